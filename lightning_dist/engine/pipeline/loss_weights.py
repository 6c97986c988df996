"""What the losses of an update weigh together, known on each stage when its gradients are complete.

Only the last stage sees what a step returns, and only at the end of an update is it known what all
of its micro-batches weigh. So each backward begins with its own micro-batch's weight as the scale,
the weight travels on with the gradients, and complete gradients are divided by the sum: over the
micro-batches, the batches that are accumulated, and the data replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

AverageWeight = Callable[[float | None], float | None]
"""Takes what an update's losses weigh on this replica, None where the samples count; gives the
average over the replicas."""


@dataclass(frozen=True, slots=True)
class WeighedGradients:
    """What goes from a stage to the one before.

    Attributes:
        gradients: One for each tensor that has come the other way and requires grad.
        weight: What the micro-batch's loss weighs, a float64 tensor without a dim; None where the
            samples count.
    """

    gradients: list[Tensor | None]
    weight: Tensor | None = None

    @classmethod
    def of_loss(cls, gradients: list[Tensor | None], weight: float | None) -> WeighedGradients:
        """Begins a backward.

        Args:
            gradients: Of the roots.
            weight: What the loss weighs.
        """
        tensor = None if weight is None else torch.tensor(weight, dtype=torch.float64)
        return cls(gradients, tensor)


class LossWeights:
    """Sums the weights, and divides by them.

    Args:
        average: Over the data replicas, whose gradients are averaged too.
    """

    def __init__(self, average: AverageWeight) -> None:
        self._average = average
        self._by_update: dict[int, dict[int, float]] = {}
        self._collected: list[float] = []
        self._is_given: bool | None = None

    def note(self, update: int, index: int, weight: Tensor | float | None) -> None:
        """Remembers what a micro-batch weighs; each stage of a rank may say so.

        Args:
            update: What its gradients are for.
            index: The micro-batch.
            weight: None where the samples count.

        Raises:
            ValueError: Other micro-batches have a weight and this one has none, or vice versa.
        """
        is_given = weight is not None
        if self._is_given not in (None, is_given):
            raise mixed_weights()
        self._is_given = is_given
        if weight is not None:
            self._by_update.setdefault(update, {})[index] = float(weight)

    def collect(self, update: int) -> None:
        """Counts an update's micro-batches among those to divide by.

        Args:
            update: Which; no others of its number are noted any more.
        """
        self._collected += self._by_update.pop(update, {}).values()

    def divide(self, gradients: Iterable[Tensor]) -> None:
        """Makes complete gradients those of the weighted mean, and begins to collect anew.

        Args:
            gradients: Of the weighted sum; changed. If nothing weighs anything, they are zero.
        """
        # Exact, so that it does not depend on the order in which a stage has heard of them.
        own = math.fsum(self._collected) if self._is_given else None
        self._collected = []
        total = self._average(own)
        if total:
            for gradient in gradients:
                gradient.div_(total)

    def clear(self) -> None:
        """Forgets all weights, after a failure."""
        self._by_update.clear()
        self._collected = []


def mixed_weights() -> ValueError:
    """Says that some losses have a weight and others have none."""
    return ValueError(
        "Some training steps returned a 'weight' beside their loss and others did not, so nobody"
        " can say what they weigh together. Return it for each batch, on each rank:"
        " {'loss': loss, 'weight': n}, with the number n that the loss is a mean over; or never."
    )
