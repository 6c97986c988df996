"""DiLoCo's outer optimizer, which steps from one round of local steps to the next.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv
2311.08105), algorithm 1. A round begins with the outer weights on all replicas. Its outer gradient
is these weights less the mean of the replicas' weights at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_dist.engine.tensors.dtensor import shard_like


@dataclass(frozen=True)  # without slots, which the command line's parser does not take
class OuterOptimizer:
    """SGD on the outer gradients, as ``torch.optim.SGD`` does it.

    A rate of 1 without momentum takes the mean of the replicas' weights, as local SGD does.

    Attributes:
        lr: Outer learning rate.
        momentum: Outer momentum.
        nesterov: Whether the momentum is Nesterov's.

    Raises:
        ValueError: A value is out of range, or Nesterov's momentum is 0.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        """Checks the values."""
        if not self.lr > 0.0:
            raise ValueError(f"OuterOptimizer(lr={self.lr}): use a rate above 0, such as 0.7.")
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(
                f"OuterOptimizer(momentum={self.momentum}): use a momentum from 0 to below 1."
            )
        if self.nesterov and self.momentum == 0.0:
            raise ValueError(
                "OuterOptimizer(nesterov=True, momentum=0.0): Nesterov's step needs a momentum."
                " Give one, such as 0.9, or nesterov=False."
            )


class OuterSteps:
    """The outer optimizer's state: the outer weights while rounds are under way, and momentum."""

    def __init__(self, options: OuterOptimizer) -> None:
        self._options = options
        self._weights: dict[nn.Parameter, Tensor] = {}
        self._momentum: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remembers the weights that parameters have before their first local step."""
        for parameter in parameters:
            if parameter not in self._weights:
                self._weights[parameter] = parameter.detach().clone()

    def weights(self, parameter: nn.Parameter) -> Tensor:
        """Returns the outer weights of a parameter that has begun a local step."""
        return self._weights[parameter]

    @torch.no_grad()
    def step(self, parameters: Sequence[nn.Parameter], means: Sequence[Tensor]) -> list[Tensor]:
        """Steps the outer weights to the replicas' means of them, and returns them."""
        options = self._options
        for parameter, mean in zip(parameters, means, strict=True):
            gradient = self._weights[parameter] - mean
            update = gradient
            if options.momentum:
                before = self._momentum.get(parameter)
                kept = gradient.clone() if before is None else before * options.momentum + gradient
                self._momentum[parameter] = kept
                update = gradient + options.momentum * kept if options.nesterov else kept
            # From the mean on, so that a rate of 1 without momentum leaves exactly the mean.
            self._weights[parameter] = mean + (gradient - options.lr * update)
        return [self._weights[parameter] for parameter in parameters]

    def end(self) -> None:
        """Forgets the outer weights, which all replicas have now."""
        self._weights.clear()

    def momentum_by_name(self, module: nn.Module) -> dict[str, Tensor]:
        """Returns the momentum of a module's parameters that have one."""
        named = module.named_parameters()
        return {name: self._momentum[p] for name, p in named if p in self._momentum}

    def load_momentum(self, module: nn.Module, momentum: Mapping[str, Tensor]) -> None:
        """Takes the momentum of a module's parameters from a checkpoint."""
        self._momentum = {
            parameter: shard_like(momentum[name].to(parameter.dtype), parameter).to(
                parameter.device, copy=True
            )
            for name, parameter in module.named_parameters()
            if name in momentum
        }
