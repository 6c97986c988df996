"""The costs of a model as a search needs them: at any micro-batch, on tensor-parallel ranks.

They are measured at a few sizes of a micro-batch. Between two sizes they are interpolated, for a
small micro-batch costs more per sample. Beyond the largest size they grow in proportion.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from statistics import fmean
from typing import Any, TypeVar

from lightning_dist.engine.planning.layer_costs import (
    LayerCosts,
    StepCosts,
    activations_of,
    transients_of,
)


@dataclass(frozen=True, slots=True)
class MeasuredBatch:
    """The costs of a training step on one micro-batch.

    Attributes:
        num_samples: Samples of the micro-batch.
        step: Costs of the layers, and of the rest of the step.
        rest_bytes: Bytes that a forward keeps outside of the layers, for the loss.
        transient_bytes: Most bytes that the loss and its backward hold for a moment, besides what
            forwards keep.
    """

    num_samples: int
    step: StepCosts
    rest_bytes: int = 0
    transient_bytes: int = 0

    def held_by_stages(self, partition: Sequence[int]) -> tuple[list[float], list[float]]:
        """Returns the bytes that each stage keeps, and what its backward needs for a moment."""
        ends = list(accumulate(partition))
        layers = self.step.layers
        stages = [layers[end - n : end] for end, n in zip(ends, partition, strict=True)]
        kept = [float(activations_of(stage)) for stage in stages]
        kept[-1] += self.rest_bytes
        needs = [float(transients_of(stage)) for stage in stages[:-1]]
        last = transients_of(stages[-1], self.rest_bytes)
        return kept, [*needs, max(self.transient_bytes, last)]


_Costs = TypeVar("_Costs", LayerCosts, StepCosts, MeasuredBatch)


@dataclass(frozen=True, slots=True)
class TensorCosts:
    """What tensor parallelism does to a model.

    Attributes:
        shares: Share of each layer's parameters that are sharded.
        num_layers: Layers that are sharded.
        num_messages: Collectives in a forward and backward.
        message_bytes: Bytes of these for each sample, each at its larger end.
        meetings: How often the ranks sum activations in each layer's forward.
    """

    shares: tuple[float, ...]
    num_layers: int
    num_messages: int
    message_bytes: float
    meetings: tuple[int, ...]

    def on_each_rank(self, layers: Sequence[LayerCosts], num_ranks: int) -> list[LayerCosts]:
        """Returns the costs of layers on each of some tensor-parallel ranks."""
        return [
            _shard(layer, 1.0 - share * (1.0 - 1.0 / num_ranks), count)
            for layer, share, count in zip(layers, self.shares, self.meetings, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """The costs of a model, whole on one rank.

    Attributes:
        batches: Costs at some sizes of a micro-batch, in rising order.
        states_per_parameter: Bytes of optimizer state for each byte of parameters.
        num_parameters: Number of trainable tensors.
        tensor: What tensor parallelism does, by the number of ranks; other numbers are impossible.
        can_cut: Whether the layers can be put on several stages.
        is_tied: Whether layers share parameters.
        whole_batches: Whether a batch must stay whole, as BatchNorm needs it.
        layers: The argument of :class:`.PipelineConfig` of this name that finds the layers.
        waiting: How much longer layers take where ranks compute at the same time and meet.
        adding_seconds: Time of adding a byte of gradients to those of earlier micro-batches.
        update_bytes: Bytes that an update of all parameters needs for a moment.
        updates_together: Whether these grow with the number of parameters (``foreach``); else they
            are of the largest one.
        sample_bytes: Bytes of a sample that one rank of a replica reads and sends to the others.

    Raises:
        ValueError: There is no size, or sizes are of different layers.
    """

    batches: tuple[MeasuredBatch, ...]
    states_per_parameter: float = 2.0
    num_parameters: int = 0
    tensor: Mapping[int, TensorCosts] = field(default_factory=dict)
    can_cut: bool = True
    is_tied: bool = False
    whole_batches: bool = False
    layers: str = "auto"
    waiting: float = 1.0
    adding_seconds: float = 0.0
    update_bytes: float = 0.0
    updates_together: bool = False
    sample_bytes: float = 0.0

    def __post_init__(self) -> None:
        """Checks the sizes."""
        sizes = [batch.num_samples for batch in self.batches]
        if not sizes or sizes != sorted({*sizes}) or sizes[0] < 1:
            raise ValueError(f"The micro-batches' sizes {sizes} must rise, from 1 or more.")
        numbers = {len(batch.step.layers) for batch in self.batches}
        if len(numbers) != 1 or 0 in numbers:
            raise ValueError(f"The micro-batches must have the same layers, not {sorted(numbers)}.")

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.batches[0].step.layers)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all trainable parameters."""
        layers = self.batches[0].step.layers
        return sum(layer.parameter_bytes - layer.tied_bytes for layer in layers)

    def at(
        self,
        num_samples: float,
        tp: int = 1,
        recomputes: bool = False,
        num_microbatches: int | None = None,
    ) -> MeasuredBatch:
        """Returns the costs of a micro-batch on tensor-parallel ranks, without their messages.

        Args:
            num_samples: Samples of the micro-batch.
            tp: Number of tensor-parallel ranks.
            recomputes: Whether layers keep their inputs only, and run again in the backward.
            num_microbatches: Micro-batches of a step on stages, whose gradients are added up; None
                without stages. A single one is on one rank at a time, so that none waits for a
                slower one.
        """
        found = self._between(num_samples)
        if num_microbatches != 1:
            found = _combined([found], _TIMES, lambda own: self.waiting * own[0])
        layers = list(found.step.layers)
        if tp > 1:
            layers = self.tensor[tp].on_each_rank(layers, tp)
        if recomputes:
            layers = [_recompute(layer) for layer in layers]
        if num_microbatches is None:  # one rank has them all; stages have a copy each
            layers = [_untie(layer) for layer in layers]
        if num_microbatches is not None:
            per_byte = self.adding_seconds * (1.0 - 1.0 / num_microbatches)  # the first add to none
            layers = [_add(layer, per_byte) for layer in layers]
        return replace(found, step=replace(found.step, layers=tuple(layers)))

    def _between(self, num_samples: float) -> MeasuredBatch:
        first, *_, last = (*self.batches, self.batches[-1])
        if num_samples >= last.num_samples:
            factor = num_samples / last.num_samples
            return _combined([last], _OF_SAMPLES, lambda own: factor * own[0])
        if num_samples <= first.num_samples:
            return first
        above = next(b for b in self.batches if b.num_samples >= num_samples)
        below = self.batches[self.batches.index(above) - 1]
        share = (num_samples - below.num_samples) / (above.num_samples - below.num_samples)
        return _combined(
            [below, above], _OF_SAMPLES, lambda two: two[0] + share * (two[1] - two[0])
        )


def averaged(costs: Sequence[ModelCosts]) -> ModelCosts:
    """Returns the mean costs of one model on several ranks, with what they wait for each other.

    Times vary from rank to rank and from moment to moment. Ranks that meet in each layer take as
    long as the slowest one. All have been measured at the same sizes.
    """
    same_batches = [*zip(*(each.batches for each in costs), strict=True)]
    mean, slowest = (
        replace(costs[0], batches=tuple(_combined(same, _TIMES, how) for same in same_batches))
        for how in (fmean, max)
    )
    times = [sum(b.step.compute_seconds for b in each.batches) for each in (mean, slowest)]
    return replace(
        mean,
        waiting=times[1] / times[0] if times[0] else 1.0,
        adding_seconds=fmean(each.adding_seconds for each in costs),
    )


_KINDS = (LayerCosts, StepCosts, MeasuredBatch)
_NUMBERS = {field.name for kind in _KINDS for field in fields(kind)} - {"name", "layers", "step"}
_TIMES = {name for name in _NUMBERS if name.endswith("_seconds")}
# An update and the parameters are the same, whatever the samples of a micro-batch.
_OF_PARAMETERS = {"parameter_bytes", "tied_bytes", "frozen_bytes", "buffer_bytes"}
_OF_SAMPLES = _NUMBERS - _OF_PARAMETERS - {"update_seconds", "resident_bytes", "version_bytes"}


def _combined(
    batches: Sequence[MeasuredBatch],
    names: Collection[str],
    how: Callable[[Sequence[float]], float],
) -> MeasuredBatch:
    """Combines the numbers of some names; others are those of the last micro-batch."""
    steps = [batch.step for batch in batches]
    of_layers = zip(*(step.layers for step in steps), strict=True)
    layers = tuple(_combined_fields(same, names, how) for same in of_layers)
    step = replace(_combined_fields(steps, names, how), layers=layers)
    return replace(_combined_fields(batches, names, how), step=step)


def _combined_fields(
    same: Sequence[_Costs], names: Collection[str], how: Callable[[Sequence[float]], float]
) -> _Costs:
    own = [field.name for field in fields(same[-1]) if field.name in names]
    found: dict[str, Any] = {name: how([getattr(each, name) for each in same]) for name in own}
    return replace(same[-1], **found)


def _shard(layer: LayerCosts, left: float, num_meetings: int) -> LayerCosts:
    """Returns a layer's costs on a rank that is left with a part of its parameters and work.

    Where ranks have summed, each has a whole activation: the next norm's input, and its output
    (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 4.2.1).
    """
    whole = max(1, 2 * num_meetings) * layer.boundary_bytes
    kept = min(layer.activation_bytes, whole)
    return replace(
        layer,
        forward_seconds=layer.forward_seconds * left,
        backward_seconds=layer.backward_seconds * left,
        parameter_bytes=round(layer.parameter_bytes * left),
        tied_bytes=round(layer.tied_bytes * left),
        frozen_bytes=round(layer.frozen_bytes * left),
        activation_bytes=kept + round((layer.activation_bytes - kept) * left),
        shared_bytes=min(layer.shared_bytes, kept),
    )


def _add(layer: LayerCosts, seconds_per_byte: float) -> LayerCosts:
    seconds = seconds_per_byte * layer.parameter_bytes
    return replace(layer, backward_seconds=layer.backward_seconds + seconds)


def _untie(layer: LayerCosts) -> LayerCosts:
    own = layer.parameter_bytes - layer.tied_bytes
    return replace(layer, parameter_bytes=own, tied_bytes=0)


def _recompute(layer: LayerCosts) -> LayerCosts:
    return replace(
        layer,
        backward_seconds=layer.backward_seconds + layer.forward_seconds,
        activation_bytes=min(layer.activation_bytes, layer.boundary_bytes),
        shared_bytes=0,
    )
