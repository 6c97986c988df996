"""What the layers of a pipelined module cost, wherever they are, and what stages of them would.

A stage's forward is that of its layers and of what each stage does beside them: the user's step up
to the pipelined module. The last stage has the rest of the step too, the loss. So a cut changes
what a stage costs by its layers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from lightning_dist.pipeline.partition import partition_layers
from lightning_dist.pipeline.simulator import StageCosts


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """One layer, for one micro-batch.

    Attributes:
        name: In the pipelined module.
        forward_seconds: Of its forward.
        backward_seconds: Of its whole backward.
        boundary_bytes: Of what it hands to the next layer.
        parameter_bytes: Of its trainable parameters.
        activation_bytes: What its forward keeps for its backward, its parameters left out.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    boundary_bytes: int = 0
    parameter_bytes: int = 0
    activation_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True)
class StepCosts:
    """A training step on a pipeline.

    Attributes:
        layers: In their order.
        own_forward_seconds: What each stage does in a forward beside its layers.
        own_backward_seconds: In a backward.
        loss_forward_seconds: What the last stage does beyond that in a forward.
        loss_backward_seconds: In a backward.
        update_seconds: One optimizer update.
    """

    layers: tuple[LayerCosts, ...]
    own_forward_seconds: float = 0.0
    own_backward_seconds: float = 0.0
    loss_forward_seconds: float = 0.0
    loss_backward_seconds: float = 0.0
    update_seconds: float = 0.0

    def of_stages(self, layers_per_stage: Sequence[int]) -> StageCosts:
        """Adds up what the stages of a cut cost.

        Args:
            layers_per_stage: The cut.
        """
        ends = list(accumulate(layers_per_stage))
        stages = [self.layers[end - n : end] for end, n in zip(ends, layers_per_stage, strict=True)]
        forward = [self.own_forward_seconds + sum(c.forward_seconds for c in s) for s in stages]
        backward = [self.own_backward_seconds + sum(c.backward_seconds for c in s) for s in stages]
        forward[-1] += self.loss_forward_seconds
        backward[-1] += self.loss_backward_seconds
        return StageCosts(tuple(forward), tuple(backward), update_seconds=self.update_seconds)

    def best_cut(self, num_stages: int) -> tuple[int, ...]:
        """Finds the cut whose slowest stage is fastest.

        Args:
            num_stages: Stages of the pipeline.

        Raises:
            ValueError: More stages than layers.
        """
        costs = [layer.seconds for layer in self.layers]
        costs[-1] += self.loss_forward_seconds + self.loss_backward_seconds
        return tuple(partition_layers(costs, num_stages))
