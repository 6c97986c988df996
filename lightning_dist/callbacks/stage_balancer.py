"""Tell users of a pipeline where their layers' time goes, and which cut would be faster.

The classic mistake of pipelining is to cut by the number of parameters: an embedding is large and
quick, attention is small and slow. So layers are timed while they train, for a few batches now and
then, and all ranks learn of all of them. What a better cut would bring is the simulator's answer,
for with few micro-batches filling and draining hide much of a stage's idleness.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from typing_extensions import override

from lightning_dist.callbacks.balance_report import draw_balance, tell_balance
from lightning_dist.pipeline.balance import Balance, find_balance
from lightning_dist.pipeline.layer_costs import RankProfile, StepCosts
from lightning_dist.pipeline.layer_profiler import LayerProfiler
from lightning_dist.strategies.pipeline import PipelineStrategy


class StageBalancer(pl.Callback):
    """Reports how well the stages of a :class:`~lightning_dist.PipelineStrategy` are balanced.

    Each report is metrics for all loggers: ``balance/stage_0_seconds`` and so on (forward and
    backward of one micro-batch), ``balance/step_seconds`` (predicted for a batch),
    ``balance/better_step_seconds`` (with the best cut), ``balance/gain`` (the share of a step that
    it would save) and ``balance/measured_step_seconds``. Rank 0 prints it as two tables, which W&B
    and TensorBoard show too. At the end of training the newest one is drawn, for these two and, if
    there is any logger, as ``stage_balance.png`` in ``trainer.log_dir``.

    Args:
        every_n_steps: Training batches from one report to the next.
        warmup_steps: Batches before the first one is timed, for caches and allocators to fill.
        measured_steps: Batches that are timed for a report.
        min_gain: Share of a step below which another cut is not worth the trouble.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        warmup_steps: int = 5,
        measured_steps: int = 10,
        min_gain: float = 0.05,
    ) -> None:
        if not 1 <= measured_steps <= every_n_steps or warmup_steps < 0 or not 0 <= min_gain < 1:
            raise ValueError(
                f"measured_steps={measured_steps} must be between 1 and every_n_steps="
                f"{every_n_steps}, warmup_steps={warmup_steps} not negative and min_gain={min_gain}"
                " in [0, 1)."
            )
        self._every_n_steps = every_n_steps
        self._warmup_steps = warmup_steps
        self._measured_steps = measured_steps
        self._min_gain = min_gain
        self._num_batches = 0
        self._profiler: LayerProfiler | None = None
        self._balance: Balance | None = None

    @property
    def balance(self) -> Balance | None:
        """The newest report, the same on all ranks; None before the first."""
        return self._balance

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, PipelineStrategy):
            raise ValueError(
                "StageBalancer looks at the stages of a PipelineStrategy, but the strategy is a"
                f" {type(trainer.strategy).__name__}. Leave the callback out, or use that one."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._num_batches = 0
        self._profiler = _strategy_of(trainer).session.pipeline.layer_profiler()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._place_in_window == 0 and self._profiler is not None:
            self._profiler.start()

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        is_last_one = self._place_in_window == self._measured_steps - 1
        self._num_batches += 1
        if is_last_one and self._profiler is not None:
            self._profiler.stop()
            self._report(trainer, pl_module, self._profiler.profile())

    @property
    def _place_in_window(self) -> int:
        """Batches since the latest that began a measurement; negative before the first."""
        since_warmup = self._num_batches - self._warmup_steps
        return since_warmup if since_warmup < 0 else since_warmup % self._every_n_steps

    def _report(
        self, trainer: pl.Trainer, module: pl.LightningModule, profile: RankProfile
    ) -> None:
        strategy = _strategy_of(trainer)
        everyone: list[Any] = [None] * strategy.mesh.world_size
        dist.all_gather_object(everyone, profile, group=strategy.group(*strategy.mesh.sizes))
        steps = [p.step_seconds for p in everyone if p.step_seconds == p.step_seconds]
        measured = median(steps) if steps else float("nan")
        shape = strategy.session.pipeline.shape
        balance = self._balance = find_balance(StepCosts.of_ranks(everyone), shape, measured)
        module.log_dict(_metrics_of(balance), batch_size=1)
        if trainer.is_global_zero:
            tell_balance(balance, self._conclude(balance), trainer.loggers, self._num_batches)

    def _conclude(self, balance: Balance) -> str:
        measured = f"a step took {balance.measured_step_seconds * 1e3:.2f} ms"
        if balance.gain < self._min_gain:
            return f"The stages are balanced: {measured}, and no cut saves {self._min_gain:.0%}."
        cut = list(balance.better_cut)
        return f"partition={cut} would save {balance.gain:.0%} of a step; {measured}."

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        directory = trainer.log_dir if trainer.loggers else None  # all ranks must ask for it
        if trainer.is_global_zero and self._balance is not None:
            draw_balance(self._balance, directory, trainer.loggers, self._num_batches)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._profiler is not None:
            self._profiler.stop()
        self._profiler = None


def _strategy_of(trainer: pl.Trainer) -> PipelineStrategy:
    assert isinstance(trainer.strategy, PipelineStrategy)
    return trainer.strategy


def _metrics_of(balance: Balance) -> dict[str, float]:
    stages = enumerate(balance.stage_seconds(balance.cut))
    return {
        **{f"balance/stage_{stage}_seconds": seconds for stage, seconds in stages},
        "balance/step_seconds": balance.step_seconds,
        "balance/better_step_seconds": balance.better_step_seconds,
        "balance/measured_step_seconds": balance.measured_step_seconds,
        "balance/gain": balance.gain,
    }
