"""Tell users of a pipeline where their layers' time goes, and which cut would be faster.

The classic mistake of pipelining is to cut by the number of parameters: an embedding is large and
quick, attention is small and slow. So layers are timed while they train, for a few batches now and
then, and all ranks exchange the times. The gain of a better cut is simulated, for with few
micro-batches filling and draining hide much of a stage's idleness. All ranks have the same numbers,
so they decide alike. A picture takes rank 0 some tenths of a second, in which the others wait, so
there is only one, when training is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from math import isnan
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_dist.callbacks import output
from lightning_dist.callbacks.output import Media, log_at_once
from lightning_dist.callbacks.sharded_weight_averaging import ShardedWeightAveraging
from lightning_dist.engine.common.device_group import gather_objects
from lightning_dist.engine.common.names import check_choice, check_count, check_positive
from lightning_dist.engine.pipeline.layer_profiler import LayerProfiler
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.planning.balance import Balance, find_balance, memory_limit, step_seconds
from lightning_dist.engine.planning.layer_costs import RankProfile, StepCosts
from lightning_dist.engine.planning.partition import stage_of_layers
from lightning_dist.plotting import plot_balance
from lightning_dist.strategies.base.lightning_internals import callbacks_of
from lightning_dist.strategies.base.rank_view import view_of


def print_balance(
    balance: Balance, conclusion: str, loggers: Sequence[Logger], step: int, *, print_tables: bool
) -> None:
    """Prints a conclusion, below tables if there are to be any, and shows these in loggers."""
    tables = {"layers": balance.layer_table, "stages": balance.stage_table}
    output.print_tables(tables.values() if print_tables else (), conclusion)
    media = Media(loggers)
    for name, table in tables.items():
        media.show_table(f"balance/{name}", table, step)


def conclude(balance: Balance, min_gain: float) -> str:
    """Says what the best cut of a measured balance saves, or which stage all others wait for."""
    assert balance.batches is not None
    first, last = balance.batches
    measured = f"measured in batches {first} to {last}"
    if not isnan(balance.measured_step_seconds):
        milliseconds = balance.measured_step_seconds * 1e3
        measured = f"a step took {milliseconds:.2f} ms (median of batches {first} to {last})"
    if balance.gain >= min_gain:
        cut = list(balance.better_cut)
        return f"partition={cut} would save {balance.gain:.0%} of a step; {measured}."
    seconds = balance.stage_seconds(balance.cut)
    stage = seconds.index(max(seconds))
    layers = zip(stage_of_layers(balance.cut), balance.costs.layers, strict=True)
    layer = max((own for place, own in layers if place == stage), key=lambda own: own.seconds)
    return (
        f"No cut saves {min_gain:.0%}: {measured}. Stage {stage} is the slowest, with"
        f" {seconds[stage] * 1e3:.2f} ms per micro-batch (mean {fmean(seconds) * 1e3:.2f} ms); its"
        f" layer {layer.name} takes {layer.seconds * 1e3:.2f} ms."
    )


def seconds_of_batch(profiles: Sequence[RankProfile], batches_per_update: int) -> float:
    """Returns the median time of a batch on all ranks; nan if no two updates were measured."""
    between_updates = [p.step_seconds for p in profiles if not isnan(p.step_seconds)]
    return median(between_updates) / batches_per_update if between_updates else float("nan")


class StageBalancer(pl.Callback):
    """Reports how well the stages of a pipeline are balanced, one of a mesh too.

    With ``action="rebalance"`` it also moves layers while training runs, if that saves
    ``min_gain``; see :meth:`.PipelineStrategy.repartition`. Moving layers takes a
    :class:`~lightning_dist.PipelineStrategy`.

    Each report logs metrics to all loggers at once: ``balance/stage_0_seconds`` and so on (forward
    and backward of one micro-batch), ``balance/step_seconds`` (predicted for a batch),
    ``balance/better_step_seconds`` (with the best cut), ``balance/gain`` (the share of a step that
    the best cut would save) and ``balance/measured_step_seconds``. If layers move, it logs
    ``balance/moved_layers`` and ``balance/move_seconds``, too. W&B and TensorBoard show two tables,
    of the layers and of the stages. If another cut saves ``min_gain``, rank 0 prints both tables,
    or else one line. At the end of training the newest report is drawn, for W&B and TensorBoard
    and, if there is any logger, as ``stage_balance.png`` in ``trainer.log_dir``.

    Args:
        every_n_steps: Training batches from one report to the next.
        warmup_steps: Batches before the first one is timed, for caches and allocators to fill.
        measured_steps: Batches that are timed for a report.
        min_gain: Share of a step below which another cut is not worth the trouble.
        action: Whether to move the layers.
        memory_cap_bytes: Most bytes that a rank may hold under another cut: its share of
            parameters, gradients and optimizer state, stashed weights and activations. None sets
            no bound.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        warmup_steps: int = 5,
        measured_steps: int = 10,
        min_gain: float = 0.05,
        action: Literal["report", "rebalance"] = "report",
        memory_cap_bytes: float | None = None,
    ) -> None:
        if not 1 <= measured_steps <= every_n_steps:
            raise ValueError(
                f"measured_steps={measured_steps} must be between 1 and every_n_steps="
                f"{every_n_steps}. For a short run pass measured_steps= and warmup_steps=, too."
            )
        check_count("warmup_steps", warmup_steps, at_least=0)
        if not 0 <= min_gain < 1:
            raise ValueError(f"min_gain={min_gain} must be a share of a step, in [0, 1).")
        check_choice("action", action, ("report", "rebalance"))
        if memory_cap_bytes is not None:
            check_positive("memory_cap_bytes", memory_cap_bytes)
        self._every_n_steps = every_n_steps
        self._warmup_steps = warmup_steps
        self._measured_steps = measured_steps
        self._min_gain = min_gain
        self._moves_layers = action == "rebalance"
        self._memory_cap_bytes = memory_cap_bytes
        self._num_batches = 0
        self._profiler: LayerProfiler | None = None
        self._profiled_cut: tuple[int, ...] = ()
        self._balance: Balance | None = None
        self._step = 0

    @property
    def balance(self) -> Balance | None:
        """The newest report, the same on all ranks; None before the first."""
        return self._balance

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        _check_stages(trainer, self._moves_layers)
        averages = any(isinstance(c, ShardedWeightAveraging) for c in callbacks_of(trainer))
        if self._moves_layers and averages:
            raise ValueError(
                "StageBalancer(action='rebalance') moves layers, but ShardedWeightAveraging's"
                " averages of them would stay. Use action='report', and restart with the better"
                " `partition=`; or leave the averaging out."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._num_batches = 0
        if self._moves_layers:
            layers = view_of(trainer).layers
            assert layers is not None, "checked before"
            layers.check_layers_can_move()

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._place_in_window == 0:
            if self._profiler is not None:  # of a batch that was skipped, with its epoch's rest
                self._profiler.stop()
            pipeline = _pipeline_of(trainer)
            self._profiled_cut = pipeline.shape.layers_per_stage
            self._profiler = pipeline.stages.layer_profiler(pipeline.recorder)
            self._profiler.start()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        is_last_one = self._place_in_window == self._measured_steps - 1
        self._num_batches += 1
        if is_last_one and self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            if _pipeline_of(trainer).shape.layers_per_stage == self._profiled_cut:
                self._report(trainer, pl_module, profiler)

    @property
    def _place_in_window(self) -> int:
        """Batches since the latest that began a measurement; negative before the first."""
        since_warmup = self._num_batches - self._warmup_steps
        return since_warmup if since_warmup < 0 else since_warmup % self._every_n_steps

    def _report(
        self, trainer: pl.Trainer, module: pl.LightningModule, profiler: LayerProfiler
    ) -> None:
        pipeline, optimizers = _pipeline_of(trainer), trainer.strategy.optimizers
        states = optimizers[0].state if optimizers else {}
        profiles = gather_objects(profiler.profile(states), view_of(trainer).group_of_all(""))
        last = trainer.fit_loop.total_batch_idx  # a resumed run counts on
        balance = self._balance = replace(
            self._compare(pipeline, StepCosts.of_ranks(profiles)),
            measured_step_seconds=seconds_of_batch(profiles, trainer.accumulate_grad_batches),
            batches=(last + 1 - self._measured_steps, last),
        )
        self._step = trainer.global_step
        log_at_once(trainer, module, _metrics_of(balance))
        if trainer.is_global_zero:
            conclusion, loggers = conclude(balance, self._min_gain), trainer.loggers
            has_choice = balance.gain >= self._min_gain
            print_balance(balance, conclusion, loggers, self._step, print_tables=has_choice)
        if self._moves_layers and balance.gain >= self._min_gain:
            self._move(trainer, module, balance.better_cut)

    def _move(self, trainer: pl.Trainer, module: pl.LightningModule, cut: tuple[int, ...]) -> None:
        layers = view_of(trainer).layers
        assert layers is not None, "checked before"
        done = layers.repartition(cut)
        seconds = trainer.strategy.broadcast(done.seconds)
        moved = float(len(done.moves))
        metrics = {"balance/moved_layers": moved, "balance/move_seconds": seconds}
        log_at_once(trainer, module, metrics)

    def _compare(self, pipeline: Pipeline, costs: StepCosts) -> Balance:
        shape, cap_bytes = pipeline.shape, self._memory_cap_bytes
        if cap_bytes is None:
            return find_balance(costs, shape)
        memory = memory_limit(costs.layers, shape, pipeline.stages.num_copies, cap_bytes)
        try:
            return find_balance(costs, shape, memory)
        except ValueError as error:  # it trains as it is, so this is no reason to end it
            rank_zero_info(f"memory_cap_bytes={cap_bytes:,.0f}: {error}")
            return replace(
                find_balance(costs, shape),
                better_cut=shape.layers_per_stage,
                better_step_seconds=step_seconds(costs, shape, shape.layers_per_stage),
            )

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        directory = trainer.log_dir if trainer.loggers else None  # all ranks must ask for it
        media, balance = Media(trainer.loggers), self._balance
        can_draw = find_spec("matplotlib") is not None and (directory or media.shows_pictures)
        if balance is None or not can_draw or not trainer.is_global_zero:
            return
        path = None if directory is None else Path(directory) / "stage_balance.png"
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        media.show_figure("balance/picture", plot_balance(balance, path), self._step)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._profiler is not None:
            self._profiler.stop()
        self._profiler = None


def _pipeline_of(trainer: pl.Trainer) -> Pipeline:
    pipeline = view_of(trainer).pipeline
    assert pipeline is not None, "checked before"
    return pipeline


def _check_stages(trainer: pl.Trainer, moves_layers: bool) -> None:
    """Checks that there are stages, and that their layers can move if they should."""
    view = view_of(trainer)
    if not view.has_stages:
        kind = type(trainer.strategy).__name__
        raise ValueError(
            f"StageBalancer looks at the stages of a pipeline, and {kind} has"
            " none here. Use PipelineStrategy, or MeshStrategy with pp=2 or more; or leave the"
            " callback out. StepProfiler says where the time goes under any strategy."
        )
    if moves_layers and view.layers is None:
        raise ValueError(
            "StageBalancer(action='rebalance') moves layers, and on a mesh each rank has shards of"
            " its layers, or pieces. Use action='report', and restart with"
            " `pipeline=PipelineConfig(partition=...)`; or use PipelineStrategy, whose replicas"
            " hold whole stages."
        )


def _metrics_of(balance: Balance) -> dict[str, float]:
    stages = enumerate(balance.stage_seconds(balance.cut))
    found = {
        **{f"balance/stage_{stage}_seconds": seconds for stage, seconds in stages},
        "balance/step_seconds": balance.step_seconds,
        "balance/better_step_seconds": balance.better_step_seconds,
        "balance/measured_step_seconds": balance.measured_step_seconds,
        "balance/gain": balance.gain,
    }
    return {name: value for name, value in found.items() if not isnan(value)}
