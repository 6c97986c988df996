"""Measure what a module's layers cost, on one rank that has the whole module.

The user's step runs on parts of one batch, without effect on the module. Its layers are those that
a pipeline would cut; of a module that cannot be cut, its children. What a step does outside of
them is the loss. A clock that counts floating point operations in place of time predicts a device
that is not there, and then the tensors need no values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from typing_extensions import override

from lightning_dist.engine.pipeline.layer_profiler import LayerProfiler
from lightning_dist.engine.pipeline.microbatch import Loss, Microbatch, split
from lightning_dist.engine.planning.layer_costs import StepCosts, activations_of
from lightning_dist.engine.planning.search.machine import Machine
from lightning_dist.engine.planning.search.model_costs import MeasuredBatch, ModelCosts, TensorCosts
from lightning_dist.engine.profiling.meters.memory import ActivationMeter
from lightning_dist.engine.profiling.meters.recorder import Recorder
from lightning_dist.engine.profiling.meters.step_counter import FlopCounter
from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.timeline import SpanKind
from lightning_dist.engine.splitting.blocks.find_blocks import LayersNotFoundError
from lightning_dist.engine.splitting.config import find_batch_statistics
from lightning_dist.engine.splitting.find_layers import find_layers, refuse_places_outside
from lightning_dist.engine.splitting.layers import Layers, Part
from lightning_dist.engine.tensor_parallel.apply import check_styles
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensor_parallel.plan.discovery import find_plan
from lightning_dist.engine.tensors.module_state import state_kept
from lightning_dist.engine.tensors.observers import OperationWatch
from lightning_dist.engine.tensors.rng import random_state_kept
from lightning_dist.engine.tensors.samples import batch_size_of
from lightning_dist.engine.tensors.tree import tensors_in
from lightning_dist.strategies.mesh_runtime.first_call import ahead_of_run, step_arguments
from lightning_dist.strategies.mesh_runtime.measuring.updates import (
    PeakBytes,
    TimedUpdate,
    measure_peaks,
    time_call,
)

_ROUNDS, _REPEATS = 5, 2
_FIRST_RUNS, _RUNS = 2, 5  # of sums; the first ones touch memory
_LAUNCH_SECONDS = 4e-6  # of an operation on a GPU
_MOST_SIZES = 8
_USABLE_ON_GPU = 0.92  # the rest is for contexts, communicators and fragments
_FEWER = 2  # a measured micro-batch has so many times fewer samples than the next


def refuse_manual(module: pl.LightningModule) -> None:
    """Refuses to measure a module whose step returns no loss.

    Raises:
        ValueError: The module optimizes manually.
    """
    if not module.automatic_optimization:
        raise ValueError(
            "The planner measures steps that return a loss, and this module optimizes manually."
            " Use DDPStrategy or MeshStrategy, or set `automatic_optimization = True`."
        )


@dataclass(frozen=True)
class Measurement:
    """How a module is measured.

    Attributes:
        device: The device of the module and the batch.
        context: Creates the context manager that a step runs in, of the precision.
        tensor_sizes: Numbers of tensor-parallel ranks that are wanted.
        states_per_parameter: Tensors of a parameter's size that the optimizer keeps: 2 for AdamW, 1
            for momentum, 0 for plain SGD.
        flops_per_second: Speed of a device that is not there; None measures time.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    context: Callable[[], AbstractContextManager[None]] = nullcontext
    tensor_sizes: tuple[int, ...] = ()
    states_per_parameter: int = 2
    flops_per_second: float | None = None

    def costs(self, module: pl.LightningModule, batch: Any) -> ModelCosts:
        """Measures a module on a batch.

        Args:
            module: The whole module; it is as before afterwards.
            batch: A batch as a step gets it; its samples are the largest micro-batch.

        Raises:
            ValueError: The batch has no samples, the module optimizes manually, or the step fails
                without a Trainer's run.
        """
        refuse_manual(module)
        num_samples = batch_size_of(batch)
        if not num_samples:
            raise ValueError("The batch has no samples: give tensors with the samples in dim 0.")
        parts, can_cut = _find_parts(module)
        with random_state_kept(self.device), state_kept(module), ahead_of_run(module):
            statistics = find_batch_statistics(module.train())
            # BatchNorm takes no single sample.
            sizes = sizes_to_measure(num_samples, at_least=2 if statistics else 1)
            adding = self._adding_seconds(module)
            peaks = PeakBytes()
            if self.flops_per_second is None:
                micros = [_micro(batch, size) for size in sizes]
                run = partial(self._step, module, clock=Recorder(0, self.device), keeps=True)
                states = self.states_per_parameter
                peaks = measure_peaks(module, parts, run, micros, self.device, states)
            update = TimedUpdate(module, self.device, self.states_per_parameter)
            rounds = [
                [self._measure(module, parts, batch, size, update) for size in sizes[::-1]]
                for _ in range(1 if self.flops_per_second else _ROUNDS)
            ]
            # Another program may have had the processor in some of the rounds.
            measured = [
                sorted(same, key=lambda batch: batch.step.compute_seconds)[len(same) // 2]
                for same in zip(*rounds, strict=True)
            ]
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        batches = tuple(update.added_to(peaks.added_to(batch)) for batch in measured)
        return ModelCosts(
            batches,
            states_per_parameter=self.states_per_parameter,
            num_parameters=sum(p.requires_grad for p in module.parameters()),
            can_cut=can_cut,
            is_tied=len(names) > len(list(module.parameters())),
            whole_batches=bool(statistics),
            adding_seconds=adding,
            update_bytes=peaks.update_bytes,
            updates_together=self.device.type != "cpu",
            sample_bytes=sum(t.nbytes for t in tensors_in(batch)) / num_samples,
            tensor=_of_tensor_plans(batches[-1], module, parts, self.tensor_sizes),
        )

    def _measure(
        self,
        module: pl.LightningModule,
        parts: Sequence[Part],
        batch: Any,
        size: int,
        update: TimedUpdate,
    ) -> MeasuredBatch:
        whole, micro = batch_size_of(batch) or size, _micro(batch, size)
        clock = Recorder(0, self.device)
        watch: AbstractContextManager[Any] = nullcontext()
        repeats = _REPEATS
        if self.flops_per_second is not None:
            clock = flops = _FlopRecorder(self.flops_per_second)
            watch, repeats = OperationWatch(flops.count), 0
        profiler = LayerProfiler(parts, clock)
        profiler.start()
        meter = ActivationMeter(p.detach() for p in module.parameters())
        try:
            with watch:
                with meter:
                    self._step(module, micro.content, clock)
                if repeats:
                    profiler.start()  # discards the first, which allocates
                for _ in range(repeats):
                    self._step(module, micro.content, clock, update if size == whole else None)
        finally:
            profiler.stop()
        layers = tuple(profile for _, profile in sorted(profiler.profile().layers.items()))
        spans = [span for part in clock.stretches().values() for span in part]
        rest = {}
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            taken = [span.duration_seconds for span in spans if span.action.kind is kind]
            name = f"{kind.name.lower()}_seconds"
            in_layers = sum(getattr(layer, name) for layer in layers)
            rest[f"loss_{name}"] = max(0.0, median(taken[-max(1, repeats) :]) - in_layers)
        kept = max(0, meter.peak_bytes - activations_of(layers))
        step = StepCosts(layers, **rest)
        return MeasuredBatch(micro.num_samples, step, kept)

    def _step(
        self,
        module: pl.LightningModule,
        batch: Any,
        clock: Recorder,
        update: TimedUpdate | None = None,
        *,
        keeps: bool = False,
    ) -> None:
        arguments = step_arguments(module.training_step, batch, 1)
        try:
            with self.context():  # around the backward too, which may run layers again
                with clock.span(SpanKind.COMPUTE, Action(0, ActionKind.FORWARD, 0)):
                    loss = Loss.of(module.training_step(*arguments)).value
                with clock.span(SpanKind.COMPUTE, Action(0, ActionKind.BACKWARD, 0)):
                    loss.backward()
        except Exception as error:
            error.add_note(
                "The planner runs `training_step` on one rank to measure it, ahead of the fit. Make"
                " what the step needs in `__init__` or `setup`, or use MeshStrategy, which measures"
                " nothing."
            )
            raise
        if update is not None:
            update.run()
        if not keeps:
            module.zero_grad()

    def _adding_seconds(self, module: nn.Module) -> float:
        """Times adding gradients to gradients, and returns the seconds of a byte."""
        if self.flops_per_second is not None:
            return 0.0  # it depends on the bandwidth of the memory
        sums = [torch.zeros_like(p) for p in module.parameters() if p.requires_grad]
        new = [torch.zeros_like(each) for each in sums]

        def add() -> None:
            for held, gradient in zip(sums, new, strict=True):
                held.add_(gradient)

        taken = [time_call(add, self.device) for _ in range(_FIRST_RUNS + _RUNS)]
        return median(taken[_FIRST_RUNS:]) / max(1, sum(each.nbytes for each in sums))


def sizes_to_measure(num_samples: int, at_least: int = 1) -> list[int]:
    """Returns the samples of the micro-batches to measure, halved again and again."""
    sizes = [num_samples]
    while sizes[-1] > at_least and len(sizes) < _MOST_SIZES:
        sizes.append(max(at_least, -(-sizes[-1] // _FEWER)))
    return sizes


def _micro(batch: Any, size: int) -> Microbatch:
    """Returns the first micro-batch of so many samples."""
    whole = batch_size_of(batch) or size
    return split(batch, -(-whole // size))[0]


class _FlopRecorder(Recorder):
    """A recorder whose clock is moved by operations: each one's FLOPs, and its launch."""

    def __init__(self, flops_per_second: float) -> None:
        super().__init__(0, torch.device("cpu"))
        self._counter = FlopCounter()
        self._rate = flops_per_second
        self._num_operations = 0

    def count(self, *operation: Any) -> None:
        """Counts an operation; see :class:`.OperationWatch`."""
        self._num_operations += 1
        self._counter(*operation)

    @override
    def mark(self) -> float:
        self._num_operations += 1  # no two marks are alike
        return self._counter.flops / self._rate + _LAUNCH_SECONDS * self._num_operations

    @override
    def seconds(self, mark: float) -> float:
        return mark


def parameters_per_layer(module: nn.Module) -> int:
    """Returns the number of trainable tensors of a layer that has some, in the mean; at least 1."""
    counts = [
        sum(p.requires_grad for p in part.module.parameters()) for part in _find_parts(module)[0]
    ]
    return max(1, round(sum(counts) / max(1, sum(count > 0 for count in counts))))


def tensor_sizes_of(machine: Machine) -> tuple[int, ...]:
    """Returns the numbers of tensor-parallel ranks to try on a machine: up to 8 of a host."""
    return tuple(n for n in (2, 4, 8) if machine.ranks_per_host % n == 0)


def memory_of(device: torch.device, num_sharers: int) -> float:
    """Returns the bytes of a GPU that tensors may use, or of a share of this host's memory."""
    if device.type == "cuda":
        return _USABLE_ON_GPU * torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / num_sharers


def _find_parts(module: nn.Module) -> tuple[list[Part], bool]:
    """Returns the parts of a module's layers, and whether a pipeline can cut there."""
    try:
        path, layers = _find_layers(module)
        refuse_places_outside(module, path, layers)
    except ValueError:
        trained = [pair for pair in module.named_children() if list(pair[1].parameters())]
        return [Part(name, child, index) for index, (name, child) in enumerate(trained)], False
    last = len(layers) - 1
    beside = [Part(name, part, last) for name, part in layers.loss_parameters.modules().items()]
    ahead, behind = _direct_parts(layers, is_first=True), _direct_parts(layers, is_first=False)
    return [*ahead, *layers.parts(), *behind, *beside], True


def _find_layers(module: nn.Module) -> tuple[str, Layers]:
    """Finds layers as meshes do, which trace no module."""
    with suppress(LayersNotFoundError):
        return find_layers(module, "auto")
    return find_layers(module, "auto", by_forwards=True)


def _direct_parts(layers: Layers, *, is_first: bool) -> list[Part]:
    """Returns the parameters that modules with blocks hold themselves, as parts that do not run."""
    found = []
    for placed in layers.placed:
        if placed is not layers.loss_parameters and placed.names and placed.is_first == is_first:
            holder = nn.Module()
            placed.put_into(holder)
            found.append(Part(", ".join(sorted(placed.names)), holder, layers.layer_of(placed)))
    return found


def _of_tensor_plans(
    batch: MeasuredBatch, module: nn.Module, parts: Sequence[Part], sizes: Iterable[int]
) -> dict[int, TensorCosts]:
    found = {}
    for size in sizes:
        try:
            styles = find_plan(module, size).styles
            check_styles(module, styles, size, sequence_parallel=False)
        except ValueError:
            continue
        found[size] = _tensor_costs(batch, module, parts, styles)
    return found


def _tensor_costs(
    batch: MeasuredBatch, module: nn.Module, parts: Sequence[Part], styles: Mapping[str, Style]
) -> TensorCosts:
    """Returns the shares of a plan's layers, and their messages.

    A layer that sums over ranks does so forward; the layers before it that take the whole input sum
    its gradient. Both have the size of what a layer returns.
    """
    layers = batch.step.layers
    sharded, meetings = [0.0] * len(layers), [0] * len(layers)
    sizes, num_layers = [], 0
    for name, style in styles.items():
        part = module.get_submodule(name)
        index = next((p.layer_index for p in parts if part in p.module.modules()), None)
        if index is None or not (style.cuts_a_matrix or style is Style.VOCAB):
            continue
        num_layers += 1
        sharded[index] += sum(p.nbytes for p in part.parameters())
        if style is not Style.COLWISE:
            sizes.append(layers[index].boundary_bytes / batch.num_samples)
            meetings[index] += 1
    pairs = zip(sharded, layers, strict=True)
    shares = tuple(own / max(1, layer.parameter_bytes) for own, layer in pairs)
    return TensorCosts(shares, num_layers, 2 * len(sizes), 2.0 * sum(sizes), (*meetings,))
