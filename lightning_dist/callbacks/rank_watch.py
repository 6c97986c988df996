"""Measures this rank's training steps, under any strategy.

Counting operations and tracing collectives slow a step down, so no step is counted or traced and
timed. The plan of steps (:mod:`.profiling.step_plan`) says what each step is measured for.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PyTorchProfiler

from lightning_dist.callbacks.loop_profiler import LoopProfiler
from lightning_dist.engine.pipeline.layer_profiler import LayerProfiler
from lightning_dist.engine.planning.layer_costs import LayerCosts
from lightning_dist.engine.planning.memory import RankMemory, TrainedPart
from lightning_dist.engine.profiling.exposure import Exposure
from lightning_dist.engine.profiling.meters.memory import bytes_of, gradient_bytes, optimizer_bytes
from lightning_dist.engine.profiling.meters.recorder import Recorder
from lightning_dist.engine.profiling.meters.step_counter import StepCounter, num_samples, num_tokens
from lightning_dist.engine.profiling.meters.torch_trace import CollectiveTrace
from lightning_dist.engine.profiling.record import (
    MemoryUse,
    Phase,
    PhaseKind,
    RankPlace,
    RankRecord,
    StepCount,
)
from lightning_dist.engine.profiling.step_plan import Role, StepPlan
from lightning_dist.engine.schedules.timeline import Span
from lightning_dist.strategies.base.lightning_internals import profiler_of, set_profiler
from lightning_dist.strategies.base.precision_plugin import half_precision_of
from lightning_dist.strategies.base.rank_view import view_of


class RankWatch:
    """Measures a training from its begin to its end. Collective: every rank needs one.

    Attributes:
        device: The device that this rank computes on.
        group: A gloo group of all ranks, for this watch alone; None if there is one rank.
        loop: The profiler between Lightning's loop and the user's profiler.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._trainer, self._module = trainer, module
        self._view = view = view_of(trainer)
        self.device: torch.device = trainer.strategy.root_device
        self._pipeline = pipeline = view.pipeline
        self.group: dist.ProcessGroup | None = None
        if trainer.world_size > 1:
            self.group = view.group_of_all("profile")
        self._recorder = (
            Recorder(trainer.global_rank, self.device) if pipeline is None else pipeline.recorder
        )
        users = profiler_of(trainer)
        self.loop = LoopProfiler(users, self._recorder, records_steps=pipeline is None)
        self._counter: StepCounter | None = None
        self._layers: LayerProfiler | None = None
        self._layer_costs: Mapping[int, LayerCosts] = {}
        is_traced = isinstance(users, PyTorchProfiler)  # torch runs one at a time
        wants_trace = pipeline is None and self.group is not None and not is_traced
        self._trace = CollectiveTrace(self.device) if wants_trace else None
        self._count = StepCount()
        self._exposure: Exposure | None = None
        self._marks: list[Any] = []
        self._num_samples = 0
        self._num_tokens: int | None = 0
        self._gradient_bytes = 0
        set_profiler(trainer, self.loop)

    @property
    def num_examined(self) -> int:
        """Number of batches from one optimizer step to the next."""
        return self._trainer.accumulate_grad_batches

    @property
    def num_counted(self) -> int:
        """Number of batches until those of one optimizer step have passed all stages."""
        return self.num_examined + (0 if self._pipeline is None else self._pipeline.lag)

    def now(self) -> float:
        """Returns the time of this rank's clock, in seconds."""
        return self._recorder.seconds(self._recorder.mark())

    def close(self) -> None:
        """Stops all measurements, and restores the user's profiler."""
        self._stop_meters()
        self._recorder.take()  # of a window that has not ended
        if profiler_of(self._trainer) is self.loop:
            set_profiler(self._trainer, self.loop.users)

    def _stop_meters(self) -> None:
        for meter in (self._counter, self._trace, self._layers):
            if meter is not None:
                meter.stop()

    def _barrier(self) -> None:
        if self.group is not None:
            dist.barrier(self.group)

    # --- counting and examining --------------------------------------------------------------

    def begin(self, role: Role, *, is_first: bool) -> None:
        """Begins a batch; ``is_first`` says that the batch before had another role."""
        if not is_first or role is Role.TIMED:
            return
        self._stop_meters()  # begun for a batch that was skipped
        if role is Role.COUNTED:
            self._counter = StepCounter(self._view.mesh, self._module.parameters())
            self._counter.start()
            return
        if self._pipeline is not None:  # layers may have moved
            self._layers = self._pipeline.stages.layer_profiler(self._pipeline.recorder)
            self._layers.start()
        if self._trace is not None:
            self._trace.start(self._barrier)
            self.loop.annotates = True

    def end(self, role: Role, plan: StepPlan, *, is_last: bool) -> None:
        """Ends a batch; ``is_last`` says that the next batch has another role."""
        if role is Role.COUNTED and is_last and self._counter is not None:
            self._counter.stop()
            self._count = self._counter.count(plan.num_counted, self._num_forwards)
            self._counter = None
        if role is not Role.EXAMINED or not is_last:
            return
        if self._layers is not None:
            self._layers.stop()
            self._layer_costs = self._layers.profile().layers  # while the recorder has its spans
        if self._trace is not None:
            self.loop.annotates = False
            self._exposure = self._trace.stop()

    @property
    def _num_forwards(self) -> int:
        """Number of forwards of this rank in a batch."""
        if self._pipeline is None:
            return 1
        return len(self._pipeline.stages) * max(1, len(self._pipeline.microbatch_sizes))

    def note_gradients(self) -> None:
        """Updates the most bytes of gradients, those that a pipeline holds included."""
        held: Iterable[torch.Tensor] = []
        if self._pipeline is not None and self._pipeline.has_gradients:
            update, stages = self._pipeline.due_update, self._pipeline.stages.values()
            held = [g for stage in stages for g in stage.gradients.held(update).values()]
        present = gradient_bytes(self._module.parameters()) + bytes_of(held)
        self._gradient_bytes = max(self._gradient_bytes, present)

    # --- timing ------------------------------------------------------------------------------

    def begin_timing(self) -> None:
        """Begins the first timed batch, before its data are read. Collective: a barrier."""
        self._barrier()  # some ranks have read a longer trace, and the others would wait
        self._recorder.keep()
        self._marks = [self._recorder.mark()]
        self._num_samples, self._num_tokens = 0, 0
        self.loop.listens = True

    def end_timed(self, batch: Any) -> None:
        """Ends a timed batch, with the batch that was trained on."""
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
        spans = _outside_validation(self._recorder.take(), phases)
        return RankRecord(
            place=self._place,
            steps=tuple(zip(ends, ends[1:], strict=False)),
            spans=tuple(span for _, span in spans),
            phases=phases,
            num_samples=self._num_samples,
            num_tokens=self._num_tokens,
            count=self._count,
            memory=self._memory,
            exposure=self._exposure,
            layers=self._layer_costs,
            stretches=tuple(stretch for stretch, _ in spans),
        )

    @property
    def _place(self) -> RankPlace:
        rank, is_gpu = self._trainer.global_rank, self.device.type == "cuda"
        mesh = self._view.mesh
        return RankPlace(
            rank=rank,
            host=socket.gethostname(),
            device=torch.cuda.get_device_name(self.device) if is_gpu else self.device.type,
            precision=computes_in(self._trainer.precision_plugin),
            stage_group=mesh.coordinates(rank)["pp"],
            data_index=mesh.data_index(rank),
            strategy=type(self._trainer.strategy).__name__,
            shape=None if self._pipeline is None else self._pipeline.shape,
        )

    @property
    def _memory(self) -> MemoryUse:
        stash = {} if self._pipeline is None else self._pipeline.stages.peak_stash_bytes
        measured = RankMemory(
            parameters=bytes_of(self._module.parameters()),
            gradients=self._gradient_bytes,
            optimizer_state=optimizer_bytes(self._trainer.optimizers),
            activations=self._count.activation_bytes,
            stash=sum(stash.values()),
        )
        states = round(measured.optimizer_state / max(1, measured.parameters))
        part = TrainedPart(measured.parameters, self._count.forward_bytes, states)
        accumulates = self._trainer.accumulate_grad_batches > 1
        predicted = self._view.predict_memory(part, accumulates)
        is_gpu = self.device.type == "cuda"
        allocated = torch.cuda.max_memory_allocated(self.device) if is_gpu else None
        return MemoryUse(measured, predicted, allocated)


def computes_in(plugin: Precision) -> str:
    """Returns the precision of a run's matrix products, as a Trainer or torch names it."""
    half = half_precision_of(plugin)
    return str(plugin.precision) if half is None else str(half.half.dtype)


def _outside_validation(
    spans: Iterable[tuple[int, Span]], phases: Iterable[Phase]
) -> list[tuple[int, Span]]:
    validations = [p for p in phases if p.kind is PhaseKind.VALIDATION]
    return [
        (stretch, span)
        for stretch, span in spans
        if not any(v.start_seconds <= span.start_seconds < v.end_seconds for v in validations)
    ]
