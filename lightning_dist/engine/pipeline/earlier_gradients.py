"""What an earlier update has left in ``p.grad``, apart from the gradients of a batch.

What comes of a batch may have to be divided, by the weights of its losses, or summed over the
copies of a parameter. That must not happen to what the user keeps of earlier updates a second time.
Where gradients are cleared after each update, there is nothing to set apart.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_dist.engine.pipeline.gradients import add_gradient


class EarlierGradients:
    """Sets apart what an earlier update has left in ``p.grad``, while new gradients are summed."""

    def __init__(self) -> None:
        self._earlier: dict[nn.Parameter, Tensor] = {}
        self._incomplete: set[nn.Parameter] = set()

    def set_apart(self, parameters: Iterable[nn.Parameter]) -> None:
        """Takes earlier gradients away, before a batch's gradients are installed."""
        for parameter in parameters:
            if parameter.grad is None:
                self._earlier.pop(parameter, None)  # the user has cleared it between two batches
            elif parameter not in self._incomplete:
                self._earlier[parameter], parameter.grad = parameter.grad, None

    def keep(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gives back what a batch added nothing to, where more batches follow before the update."""
        self._incomplete = {p for p in parameters if p.grad is not None}
        for parameter in self._earlier.keys() - self._incomplete:
            parameter.grad = self._earlier.pop(parameter)

    @torch.no_grad()
    def add(self) -> None:
        """Adds complete gradients to earlier ones, into the earlier tensors, as autograd does."""
        for parameter, earlier in self._earlier.items():
            new = parameter.grad
            parameter.grad = earlier if new is None else add_gradient(new, earlier)
        self._earlier, self._incomplete = {}, set()
