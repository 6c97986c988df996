"""Show where the time of training steps goes, under any strategy.

Now and then some batches in a row are measured on all ranks: those of one optimizer step, whose
operations are counted (once), as many whose layers or collectives are examined, and then those that
are timed, undisturbed.
Then the ranks compare their clocks and exchange their measurements, so that each
metric is the same on all of them and rank 0 can draw one picture.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.profiler import profile
from typing_extensions import override

from lightning_dist.callbacks.output import log_at_once, publish
from lightning_dist.callbacks.rank_watch import RankWatch
from lightning_dist.engine.common.device_group import gather_objects
from lightning_dist.engine.profiling.meters.clock_sync import exchange_pings
from lightning_dist.engine.profiling.meters.torch_trace import trace_for_perfetto
from lightning_dist.engine.profiling.record import ClockOffset, PhaseKind, RankRecord
from lightning_dist.engine.profiling.report import ProfileReport
from lightning_dist.engine.profiling.step_plan import Role, StepPlan
from lightning_dist.engine.schedules.timeline import Timeline
from lightning_dist.strategies.base.lightning_internals import callbacks_of, profiler_of


class StepProfiler(pl.Callback):
    """Measures steps, and reports them.

    Each time ``profile/step_seconds``, ``profile/samples_per_second``, ``profile/waiting_share``
    and so on go to all loggers at once, whatever ``log_every_n_steps`` is
    (:attr:`.ProfileReport.metrics` lists them). At the end of training, or when it fails or is
    interrupted, rank 0 prints tables and writes ``step_profile.html``, ``step_profile.png`` and
    ``step_profile.json`` (for Perfetto) of the newest report.

    Strategies of this package with stages are timed action by action, and their layers one by one.
    Any other strategy, Lightning's too, is timed by forward, backward and update; how much of its
    collectives nothing hides is seen in a traced batch before the timed ones. Counting takes
    torch's own formulas, of matrix products, convolutions and attention.

    Args:
        every_n_steps: Training batches from one report to the next.
        active_steps: Batches that are timed for a report.
        trace_dir: Directory to write files to; None takes ``trainer.log_dir``.
        torch_profiler: Whether each rank also writes torch's own trace of the timed batches, as
            ``torch_rank0_batch7.json.gz``. That slows them down.
        warmup_steps: Batches before the first that is looked at.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        every_n_steps: int = 500,
        active_steps: int = 10,
        trace_dir: str | None = None,
        torch_profiler: bool = False,
        warmup_steps: int = 5,
    ) -> None:
        self._plan = StepPlan(every_n_steps, active_steps, warmup_steps)
        self._trace_dir = trace_dir
        self._torch_profiler = torch_profiler
        self._directory = Path()
        self._batch = 0
        self._has_begun_batch = False
        self._watch: RankWatch | None = None
        self._torch: profile | None = None
        self._report: ProfileReport | None = None
        self._unpublished: tuple[ProfileReport, int] | None = None

    @property
    def report(self) -> ProfileReport | None:
        """The newest report, the same on all ranks; None before the first."""
        return self._report

    @property
    def timeline(self) -> Timeline | None:
        """The ranks' timeline in the newest report, on one clock; None before the first."""
        return None if self._report is None else self._report.timeline

    # --- begin and end -----------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if any(isinstance(c, StepProfiler) and c is not self for c in callbacks_of(trainer)):
            raise ValueError(
                "There are two StepProfilers, and each would measure the other. Leave one of them"
                " out; every_n_steps= and active_steps= say which steps one looks at."
            )
        if self._torch_profiler and isinstance(profiler_of(trainer), PyTorchProfiler):
            raise ValueError(
                "StepProfiler(torch_profiler=True) and Trainer(profiler='pytorch') would both run"
                " torch's profiler, and only one can. Leave one of them out."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        directory = self._trace_dir or trainer.log_dir or "."  # all ranks must ask for `log_dir`
        self._directory = Path(directory)
        self._batch, self._has_begun_batch = 0, False
        self._report = self._unpublished = None
        self._watch = RankWatch(trainer, pl_module)
        counted, examined = self._watch.num_counted, self._watch.num_examined
        self._plan = replace(self._plan, num_counted=counted, num_examined=examined)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()
        if self._report is None:
            plan = self._plan
            looked_at = plan.num_counted + plan.num_examined + plan.active_steps
            first_report = plan.warmup_steps + looked_at
            rank_zero_warn(
                f"StepProfiler has nothing to report: training ended after {self._batch} batches,"
                f" and the first report needs {first_report}. Train longer, or make"
                " warmup_steps or active_steps smaller."
            )
        self._publish(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        self._close()
        self._publish(trainer)

    def _publish(self, trainer: pl.Trainer) -> None:
        """Publishes the newest report, on rank 0 and once."""
        newest, self._unpublished = self._unpublished, None
        if newest is not None and trainer.is_global_zero:
            report, step = newest
            publish(report, self._directory, trainer.loggers, step)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        if self._torch is not None:
            self._torch.stop()
        if self._watch is not None:
            self._watch.close()
        self._watch = self._torch = None

    # --- batches -----------------------------------------------------------------------------

    @property
    def _role(self) -> Role:
        return self._plan.role(self._batch)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        role = self._role
        if role is Role.NOTHING or self._watch is None:
            return
        # The module may skip a batch, and the rest of its epoch. No hook is called behind it.
        was_skipped, self._has_begun_batch = self._has_begun_batch, True
        if was_skipped and role is not Role.TIMED:
            self._batch = self._plan.first_alike(self._batch)
        self._watch.loop.batch = trainer.fit_loop.total_batch_idx
        self._watch.begin(role, is_first=self._plan.role(self._batch - 1) is not role)

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        if self._watch is not None and not pl_module.automatic_optimization:
            self._watch.loop.begin_backward()

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._watch is not None and not pl_module.automatic_optimization:
            self._watch.loop.end_backward()

    @override
    def on_before_zero_grad(self, *_: Any) -> None:
        self._note_gradients()

    @override
    def on_before_optimizer_step(self, *_: Any) -> None:
        self._note_gradients()
        if self._watch is not None:
            self._watch.loop.begin_update()

    def _note_gradients(self) -> None:
        if self._watch is not None and self._role is Role.EXAMINED:
            self._watch.note_gradients()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        role, plan, number, watch = self._role, self._plan, self._batch, self._watch
        self._batch += 1
        self._has_begun_batch = False
        if role is Role.NOTHING or watch is None:
            return
        if role is Role.TIMED:
            watch.end_timed(batch)
        watch.end(role, plan, is_last=self._role is not role)
        if plan.ends_timing(number):
            self._finish(trainer, pl_module, watch)
        if plan.begins_timing(self._batch):
            if self._torch_profiler:
                self._torch = trace_for_perfetto(watch.device)
                self._torch.start()
            watch.begin_timing()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._watch is not None:
            self._watch.loop.begin(PhaseKind.VALIDATION)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._watch is not None:
            self._watch.loop.end(PhaseKind.VALIDATION)

    def _finish(self, trainer: pl.Trainer, module: pl.LightningModule, watch: RankWatch) -> None:
        record = watch.take()
        records: list[RankRecord] = [record]
        offsets: tuple[ClockOffset, ...] = (ClockOffset(),)
        if watch.group is not None:
            records = gather_objects(record, watch.group)
            offsets = exchange_pings(watch.now, watch.group)
        # Of all batches, those before a checkpoint that the run was resumed from included.
        first_batch = trainer.fit_loop.total_batch_idx + 1 - self._plan.active_steps
        self._report = ProfileReport.join(records, offsets, first_batch)
        self._unpublished = (self._report, trainer.global_step)
        log_at_once(trainer, module, self._report.metrics)
        if self._torch is not None:
            self._torch.stop()
            self._directory.mkdir(parents=True, exist_ok=True)
            name = f"torch_rank{record.place.rank}_batch{first_batch}.json.gz"
            self._torch.export_chrome_trace(str(self._directory / name))
            self._torch = None
