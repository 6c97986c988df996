"""Measure what a backward and an update hold for a moment, besides what is there anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.engine.pipeline.microbatch import Microbatch
from lightning_dist.engine.planning.search.model_costs import MeasuredBatch
from lightning_dist.engine.profiling.meters.peak import PeakMeter
from lightning_dist.engine.splitting.layers import Part
from lightning_dist.engine.tensors.tree import flatten
from lightning_dist.strategies.mesh_runtime.measuring.updates import dense, optimizer_of

_UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Moments:
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
        """Returns the costs of one of the measured micro-batches with its moments."""
        layers, kept, size = [], 0, batch.num_samples
        for index, layer in enumerate(batch.step.layers):
            kept += layer.activation_bytes - (layer.shared_bytes if index else 0)
            most = max(0, self.backwards.get((size, index), 0) - kept)
            layers.append(replace(layer, transient_bytes=most))
        most = max(0, self.forwards.get(size, 0) - kept - batch.rest_bytes)
        step = replace(batch.step, layers=tuple(layers))
        return replace(batch, step=step, transient_bytes=most)


def measure_moments(
    module: nn.Module,
    parts: Sequence[Part],
    run: Callable[[Any], None],
    batches: Sequence[Microbatch],
    device: torch.device,
    states_per_parameter: int,
) -> Moments:
    """Measures backwards and an update.

    Args:
        module: The module, without gradients; as before afterwards.
        parts: Parts of its layers.
        run: Runs a forward and a backward of a micro-batch's content, and adds gradients.
        batches: The micro-batches.
        device: The device of both.
        states_per_parameter: As for :func:`.optimizer_of`.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    run(batches[0].content)  # makes the gradients
    with PeakMeter(device) as meter:
        for micro in batches:
            size = micro.num_samples
            with _at_gradients(parts, partial(_mark, meter, size)):
                meter.start(size)
                run(micro.content)
                meter.mark(None)
        copies = [p.detach().clone() for p in trained]
        for copy, parameter in zip(copies, trained, strict=True):
            copy.grad = None if parameter.grad is None else dense(parameter.grad)
        module.zero_grad()
        if copies:
            optimizer = optimizer_of(copies, states_per_parameter)
            optimizer.step()  # makes the states
            meter.start(_UPDATE)
            optimizer.step()
    found = meter.peaks
    sizes = [micro.num_samples for micro in batches]
    places = [(size, part.layer_index) for size in sizes for part in parts]
    return Moments(
        {size: found.get(size, 0) for size in sizes},
        {place: found.get(place, 0) for place in places},
        found.get(_UPDATE, 0),
    )


def _mark(meter: PeakMeter, size: int, layer: int) -> None:
    meter.mark((size, layer))


@contextmanager
def _at_gradients(parts: Sequence[Part], call: Callable[[int], None]) -> Iterator[None]:
    """Calls a function with a layer's index whenever the gradient of its output arrives."""

    def watch(index: int, _: nn.Module, __: Any, output: Any) -> None:
        for tensor in flatten(output)[0]:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: call(index))

    handles = [p.module.register_forward_hook(partial(watch, p.layer_index)) for p in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
