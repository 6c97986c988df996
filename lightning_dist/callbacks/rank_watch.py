"""Measure this rank's steps, each according to its role."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.profilers import PyTorchProfiler

from lightning_dist.callbacks.loop_profiler import LoopProfiler
from lightning_dist.callbacks.rank_probe import RankProbe
from lightning_dist.engine.pipeline.layer_profiler import LayerProfiler
from lightning_dist.engine.profiling.exposure import Exposure
from lightning_dist.engine.profiling.meters.flops import num_samples, num_tokens
from lightning_dist.engine.profiling.meters.recorder import Recorder
from lightning_dist.engine.profiling.meters.step_counter import StepCounter
from lightning_dist.engine.profiling.meters.torch_trace import CollectiveTrace
from lightning_dist.engine.profiling.record import (
    MemoryUse,
    Phase,
    PhaseKind,
    RankRecord,
    StepCount,
)
from lightning_dist.engine.profiling.step_plan import Role, StepPlan
from lightning_dist.engine.schedules.timeline import Span
from lightning_dist.strategies.base.lightning_internals import profiler_of, set_profiler


class RankWatch:
    """Measures a training from its begin to its end, with a profiler between loop and user's.

    Args:
        trainer: The trainer, before it trains.
        module: The user's module.
        probe: The probe of this rank's strategy.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, probe: RankProbe) -> None:
        self._trainer, self._probe = trainer, probe
        pipeline = probe.pipeline
        self._recorder = (
            Recorder(trainer.global_rank, probe.device) if pipeline is None else pipeline.recorder
        )
        users = profiler_of(trainer)
        self.loop = LoopProfiler(users, self._recorder, records_steps=pipeline is None)
        self._counter: StepCounter | None = StepCounter(probe.mesh, module.parameters())
        self._layers: LayerProfiler | None = None
        is_traced = isinstance(users, PyTorchProfiler)  # torch runs one at a time
        wants_trace = pipeline is None and probe.group is not None and not is_traced
        self._trace = CollectiveTrace(probe.device) if wants_trace else None
        self._count = StepCount()
        self._exposure: Exposure | None = None
        self._marks: list[Any] = []
        self._num_samples = 0
        self._num_tokens: int | None = 0
        self._gradient_bytes = 0
        set_profiler(trainer, self.loop)

    def now(self) -> float:
        """Returns the time of this rank's clock, in seconds."""
        return self._recorder.seconds(self._recorder.mark())

    def close(self) -> None:
        """Stops all measurements, and restores the user's profiler."""
        if self._counter is not None:
            self._counter.stop()
        if self._trace is not None:
            self._trace.stop()
        if self._layers is not None:
            self._layers.stop()
        if profiler_of(self._trainer) is self.loop:
            set_profiler(self._trainer, self.loop.users)

    # --- counting and examining --------------------------------------------------------------

    def begin(self, role: Role, *, is_first: bool) -> None:
        """Begins a batch.

        Args:
            role: The role of the batch.
            is_first: Whether the batch before had another role.
        """
        if role is Role.COUNTED and is_first and self._counter is not None:
            self._counter.start()
        pipeline = self._probe.pipeline
        if role is Role.EXAMINED and pipeline is not None:  # layers may have moved
            self._layers = pipeline.stages.layer_profiler(pipeline.recorder)
            self._layers.start()
        if role is Role.EXAMINED and self._trace is not None:
            self._trace.start(self._probe.barrier)
            self.loop.annotates = True

    def end(self, role: Role, plan: StepPlan, *, is_last: bool) -> None:
        """Ends a batch.

        Args:
            role: The role of the batch.
            plan: The plan, which has the number of batches that are counted together.
            is_last: Whether the next batch has another role.
        """
        if role is Role.COUNTED and is_last and self._counter is not None:
            self._counter.stop()
            self._count = self._counter.count(plan.num_counted, self._probe.num_forwards)
            self._counter = None
        if role is Role.EXAMINED and self._layers is not None:
            self._layers.stop()
        if role is Role.EXAMINED and self._trace is not None:
            self.loop.annotates = False
            self._exposure = self._trace.stop()

    def note_gradients(self) -> None:
        """Updates the most bytes of gradients."""
        self._gradient_bytes = max(self._gradient_bytes, self._probe.gradient_bytes())

    # --- timing ------------------------------------------------------------------------------

    def begin_timing(self) -> None:
        """Begins the first timed batch, before its data are read. Collective: a barrier."""
        self._probe.barrier()  # some ranks have read a longer trace, and the others would wait
        self._marks = [self._recorder.mark()]
        self._num_samples, self._num_tokens = 0, 0
        self.loop.listens = True

    def end_timed(self, batch: Any) -> None:
        """Ends a timed batch."""
        self._marks.append(self._recorder.mark())
        self._num_samples += num_samples(batch)
        tokens = num_tokens(batch)
        known = self._num_tokens is not None and tokens is not None
        self._num_tokens = (self._num_tokens or 0) + (tokens or 0) if known else None

    def take(self) -> RankRecord:
        """Ends the timing, and returns the measurements."""
        self.loop.listens = False
        ends = [self._recorder.seconds(mark) for mark in self._marks]
        phases = self.loop.take()
        measured = self._probe.measured(self._gradient_bytes, self._count)
        predicted = self._probe.predicted(measured, self._count)
        return RankRecord(
            place=self._probe.place,
            steps=tuple(zip(ends, ends[1:], strict=False)),
            spans=_outside_validation(self._recorder.since(self._marks[0]), phases),
            phases=phases,
            num_samples=self._num_samples,
            num_tokens=self._num_tokens,
            count=self._count,
            memory=MemoryUse(measured, predicted, self._probe.allocated_bytes()),
            exposure=self._exposure,
            layers={} if self._layers is None else self._layers.profile().layers,
        )


def _outside_validation(spans: tuple[Span, ...], phases: tuple[Phase, ...]) -> tuple[Span, ...]:
    validations = [p for p in phases if p.kind is PhaseKind.VALIDATION]
    return tuple(
        span
        for span in spans
        if not any(v.start_seconds <= span.start_seconds < v.end_seconds for v in validations)
    )
