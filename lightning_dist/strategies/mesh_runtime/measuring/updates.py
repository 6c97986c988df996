"""Measures an update of the optimizer that a plan assumes: its time, and its temporary memory.

A plan is made before ``configure_optimizers`` runs. So the update is that of AdamW or SGD, with as
many tensors of state for each parameter as the plan is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_dist.engine.common.device_group import finish
from lightning_dist.engine.pipeline.microbatch import Microbatch
from lightning_dist.engine.planning.search.model_costs import MeasuredBatch
from lightning_dist.engine.profiling.meters.peak import PeakMeter
from lightning_dist.engine.splitting.layers import Part
from lightning_dist.engine.tensors.tree import tensors_in

_UPDATE = "update"
_FIRST_RUNS = 2  # which make states, and touch memory


class TimedUpdate:
    """Times an optimizer on copies of a module's parameters, between the steps of the module.

    By itself it would be slower than in a run, by half: an allocator without other tensors gives
    an optimizer's temporary ones back to the host, and gets new pages for each.

    Args:
        module: The module, whose gradients the copies take.
    """

    def __init__(self, module: nn.Module, device: torch.device, states_per_parameter: int) -> None:
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._device, self._states = device, states_per_parameter
        self._optimizer: Optimizer | None = None
        self._taken: list[float] = []

    def added_to(self, batch: MeasuredBatch) -> MeasuredBatch:
        """Returns costs with the seconds of an update in the median; 0.0 if there was none."""
        seconds = median(self._taken[_FIRST_RUNS:] or [0.0])
        return replace(batch, step=replace(batch.step, update_seconds=seconds))

    def run(self) -> None:
        """Updates the copies by the parameters' present gradients."""
        if not self._parameters:
            return
        if self._optimizer is None:
            copies = [p.detach().clone() for p in self._parameters]
            self._optimizer = optimizer_of(copies, self._states)
        _take_gradients(self._optimizer.param_groups[0]["params"], self._parameters)
        self._taken.append(time_call(self._optimizer.step, self._device))


def time_call(run: Callable[[], object], device: torch.device) -> float:
    """Returns the time of a call, to the end of what it does on the device."""
    finish(device)  # what is under way is not the call's
    start = time.perf_counter()
    run()
    finish(device)
    return time.perf_counter() - start


def dense(gradient: Tensor) -> Tensor:
    """Returns a gradient as the optimizers of :func:`optimizer_of` take it."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def _take_gradients(copies: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    for copy, parameter in zip(copies, parameters, strict=True):
        copy.grad = None if parameter.grad is None else dense(parameter.grad)


def optimizer_of(parameters: Sequence[Tensor], states_per_parameter: int) -> Optimizer:
    """Returns an optimizer that keeps so many tensors of a parameter's size."""
    momentum = 0.9 if states_per_parameter else 0.0
    return AdamW(parameters) if states_per_parameter > 1 else SGD(parameters, 0.1, momentum)


@dataclass(frozen=True, slots=True)
class PeakBytes:
    """The most bytes at a time, where the sums of gradients are there already.

    Attributes:
        forwards: Bytes of a forward and the loss, by the number of samples.
        backwards: Bytes of a layer's backward, by the number of samples and the layer's index.
        update_bytes: Bytes in an update of all parameters.
    """

    forwards: dict[int, int] = field(default_factory=dict)
    backwards: dict[tuple[int, int], int] = field(default_factory=dict)
    update_bytes: int = 0

    def added_to(self, batch: MeasuredBatch) -> MeasuredBatch:
        """Returns the costs of one of the measured micro-batches with its peaks."""
        layers, kept, size = [], 0, batch.num_samples
        for index, layer in enumerate(batch.step.layers):
            kept += layer.activation_bytes - (layer.shared_bytes if index else 0)
            most = max(0, self.backwards.get((size, index), 0) - kept)
            layers.append(replace(layer, transient_bytes=most))
        most = max(0, self.forwards.get(size, 0) - kept - batch.rest_bytes)
        step = replace(batch.step, layers=tuple(layers))
        return replace(batch, step=step, transient_bytes=most)


def measure_peaks(
    module: nn.Module,
    parts: Sequence[Part],
    run: Callable[[Any], None],
    batches: Sequence[Microbatch],
    device: torch.device,
    states_per_parameter: int,
) -> PeakBytes:
    """Measures backwards and an update."""
    trained = [p for p in module.parameters() if p.requires_grad]
    run(batches[0].content)  # makes the gradients
    with PeakMeter(device) as meter:
        for micro in batches:
            size = micro.num_samples
            with _marking_gradients(meter, size, parts):
                meter.start(size)
                run(micro.content)
                meter.mark(None)
        copies = [p.detach().clone() for p in trained]
        _take_gradients(copies, trained)
        module.zero_grad()
        if copies:
            optimizer = optimizer_of(copies, states_per_parameter)
            optimizer.step()  # makes the states
            meter.start(_UPDATE)
            optimizer.step()
    found = meter.peaks
    sizes = [micro.num_samples for micro in batches]
    places = [(size, part.layer_index) for size in sizes for part in parts]
    return PeakBytes(
        {size: found.get(size, 0) for size in sizes},
        {place: found.get(place, 0) for place in places},
        found.get(_UPDATE, 0),
    )


@contextmanager
def _marking_gradients(meter: PeakMeter, size: int, parts: Sequence[Part]) -> Iterator[None]:
    """Marks when the gradients of layers' outputs arrive."""

    def watch(index: int, _: nn.Module, __: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: meter.mark((size, index)))

    handles = [p.module.register_forward_hook(partial(watch, p.layer_index)) for p in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
