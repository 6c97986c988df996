"""The costs of a pipelined module's layers, wherever they are, and of stages made of them.

A stage's forward is that of its layers and of a part that each stage has: the user's step up to the
pipelined module. The last stage has the rest of the step too, the loss. So a partition changes a
stage's costs by its layers only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from statistics import fmean, median

from lightning_dist.engine.planning.partition import MemoryLimit, even_out_ranks, partition_layers
from lightning_dist.engine.schedules.simulator import StageCosts


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """The costs of one layer, for one micro-batch.

    Attributes:
        name: Name of the layer in the pipelined module.
        forward_seconds: Time of the layer's forward.
        backward_seconds: Time of the layer's whole backward.
        boundary_bytes: Bytes of the layer's output.
        parameter_bytes: Bytes of the layer's trainable parameters.
        tied_bytes: Bytes of these that layers before it have, too.
        frozen_bytes: Bytes of the layer's other parameters.
        buffer_bytes: Bytes of the layer's buffers.
        activation_bytes: Bytes that the forward keeps for the backward, without the parameters.
        shared_bytes: Bytes of these that layers before it keep, too, if one rank has them.
        transient_bytes: Most bytes that the backward holds for a moment, besides what this layer
            and those before it keep, and the sums of gradients.
        resident_bytes: Bytes that the layer always holds: parameters, gradients of two updates,
            buffers and optimizer state; in half precision the present copy of the parameters too.
        version_bytes: Bytes of one more version of the trainable parameters.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    boundary_bytes: int = 0
    parameter_bytes: int = 0
    tied_bytes: int = 0
    frozen_bytes: int = 0
    buffer_bytes: int = 0
    activation_bytes: int = 0
    shared_bytes: int = 0
    transient_bytes: int = 0
    resident_bytes: int = 0
    version_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Time of forward and backward."""
        return self.forward_seconds + self.backward_seconds

    @classmethod
    def of_parts(cls, parts: Sequence[LayerCosts]) -> LayerCosts:
        """Creates a layer's costs from those of its submodules, in the order in which they run."""
        numbers = [field.name for field in fields(cls) if field.name != "name"]
        found = {name: sum(getattr(part, name) for part in parts) for name in numbers}
        found["boundary_bytes"] = parts[-1].boundary_bytes
        found["activation_bytes"] = activations_of(parts)
        found["shared_bytes"] = parts[0].shared_bytes
        found["transient_bytes"] = transients_of(parts)
        return cls(name=", ".join(part.name for part in parts), **found)


def activations_of(layers: Sequence[LayerCosts]) -> int:
    """Returns the bytes that layers which follow each other on one rank keep for their backward."""
    kept = sum(layer.activation_bytes for layer in layers)
    return kept - sum(layer.shared_bytes for layer in layers[1:])


def transients_of(layers: Sequence[LayerCosts], rest_bytes: int = 0) -> int:
    """Returns the most bytes that backwards of layers on one rank need besides what they keep.

    The layers follow each other, and ``rest_bytes`` are kept for what follows them.
    """
    freed, most = rest_bytes, 0
    for layer in reversed(layers):
        most = max(most, layer.transient_bytes - freed)
        freed += layer.activation_bytes - layer.shared_bytes
    return most


@dataclass(frozen=True, slots=True)
class RankProfile:
    """One rank's measurements of a training step; medians over micro-batches.

    Attributes:
        layers: Costs of this rank's layers, by their index in the pipelined module.
        own_forward_seconds: Time of a forward without its layers, by stage of this rank.
        own_backward_seconds: Time of a backward without its layers, by stage of this rank.
        update_seconds: Time of one optimizer update; 0 if there was none.
        step_seconds: Time from one update to the next; nan if there were not two.
    """

    layers: Mapping[int, LayerCosts]
    own_forward_seconds: Mapping[int, float]
    own_backward_seconds: Mapping[int, float]
    update_seconds: float
    step_seconds: float


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The costs of a training step on a pipeline.

    Attributes:
        layers: Costs of the layers, in order.
        own_forward_seconds: Time of each stage's forward without its layers.
        own_backward_seconds: Time of each stage's backward without its layers.
        loss_forward_seconds: Further time of the last stage's forward.
        loss_backward_seconds: Further time of the last stage's backward.
        update_seconds: Time of one optimizer update.
    """

    layers: tuple[LayerCosts, ...]
    own_forward_seconds: float = 0.0
    own_backward_seconds: float = 0.0
    loss_forward_seconds: float = 0.0
    loss_backward_seconds: float = 0.0
    update_seconds: float = 0.0

    @classmethod
    def of_ranks(cls, profiles: Sequence[RankProfile]) -> StepCosts:
        """Creates the costs from the profiles of all ranks; replicas of a layer are averaged."""
        num_layers = 1 + max(index for profile in profiles for index in profile.layers)
        layers = [[p.layers[i] for p in profiles if i in p.layers] for i in range(num_layers)]
        own_forward, loss_forward = _split_off_loss([p.own_forward_seconds for p in profiles])
        own_backward, loss_backward = _split_off_loss([p.own_backward_seconds for p in profiles])
        return cls(
            layers=tuple(_mean_of(same) for same in layers),
            own_forward_seconds=own_forward,
            own_backward_seconds=own_backward,
            loss_forward_seconds=loss_forward,
            loss_backward_seconds=loss_backward,
            update_seconds=median(profile.update_seconds for profile in profiles),
        )

    @property
    def compute_seconds(self) -> float:
        """Time of forward and backward of all layers and of the loss."""
        loss = self.loss_forward_seconds + self.loss_backward_seconds
        return sum(layer.seconds for layer in self.layers) + loss

    def of_stages(self, layers_per_stage: Sequence[int]) -> StageCosts:
        """Returns the costs of the stages of a partition."""
        ends = list(accumulate(layers_per_stage))
        stages = [self.layers[end - n : end] for end, n in zip(ends, layers_per_stage, strict=True)]
        forward = [self.own_forward_seconds + sum(c.forward_seconds for c in s) for s in stages]
        backward = [self.own_backward_seconds + sum(c.backward_seconds for c in s) for s in stages]
        forward[-1] += self.loss_forward_seconds
        backward[-1] += self.loss_backward_seconds
        return StageCosts(tuple(forward), tuple(backward), update_seconds=self.update_seconds)

    def best_cut(self, num_stages: int, memory: MemoryLimit | None = None) -> tuple[int, ...]:
        """Returns the partition whose slowest stage is fastest.

        Args:
            num_stages: Number of stages of the pipeline.
            memory: Limit that no stage may exceed.

        Raises:
            ValueError: There are more stages than layers, or no partition fits into the memory.
        """
        return tuple(partition_layers(self._layer_seconds, num_stages, memory=memory))

    def evened_out(self, cut: Sequence[int], rank_of_stage: Sequence[int]) -> tuple[int, ...]:
        """Returns a partition near a given one whose ranks are more evenly busy."""
        return tuple(even_out_ranks(self._layer_seconds, cut, rank_of_stage))

    @property
    def _layer_seconds(self) -> list[float]:
        """The time of each layer, with the loss in the last one's."""
        costs = [layer.seconds for layer in self.layers]
        costs[-1] += self.loss_forward_seconds + self.loss_backward_seconds
        return costs


def _mean_of(same: Sequence[LayerCosts]) -> LayerCosts:
    return replace(
        same[0],
        forward_seconds=fmean(layer.forward_seconds for layer in same),
        backward_seconds=fmean(layer.backward_seconds for layer in same),
    )


def _split_off_loss(by_rank: Sequence[Mapping[int, float]]) -> tuple[float, float]:
    """Returns the seconds that each stage needs besides its layers, and those of the last alone."""
    by_stage: dict[int, list[float]] = {}
    for own in by_rank:
        for stage, seconds in own.items():
            by_stage.setdefault(stage, []).append(seconds)
    last = fmean(by_stage.pop(max(by_stage))) if by_stage else 0.0
    everywhere = median(fmean(seconds) for seconds in by_stage.values()) if by_stage else 0.0
    return everywhere, max(0.0, last - everywhere)
