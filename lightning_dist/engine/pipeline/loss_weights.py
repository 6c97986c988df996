"""Weights of losses: what a loss is a mean over, and the sum by which gradients are divided.

The last stage knows the weight of a micro-batch's loss. The weight travels to the other stages with
the gradients of the loss, and to other replicas before gradients are divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

AverageWeight = Callable[[float | None], float | None]
"""Takes the weight of an update's losses on this replica, None if the samples count; returns the
average over the replicas."""


class LossWeights:
    """Sums the weights of losses, and divides gradients by the sum.

    Args:
        average: Averages a weight over the data replicas, whose gradients are averaged too.
    """

    def __init__(self, average: AverageWeight) -> None:
        self._average = average
        self._by_update: dict[int, dict[int, float]] = {}
        self._collected: list[float] = []
        self._is_given: bool | None = None

    @property
    def is_given(self) -> bool:
        """Whether the losses have weights."""
        return self._is_given is True

    def note(self, update: int, index: int, weight: Tensor | float | None) -> None:
        """Remembers the weight of a micro-batch's loss for an update; None if the samples count.

        Each stage of a rank may call it.

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
        """Adds an update's weights to those that :meth:`divide` divides by; no more will come."""
        self._collected += self._by_update.pop(update, {}).values()

    @contextmanager
    def as_mean(self, parameter: nn.Parameter, gradient: Tensor) -> Iterator[None]:
        """Wraps hooks, which see the mean over the collected weights in place of the sum.

        The parameter's ``grad`` is a sum before and after; the gradient to add is divided in place.
        """
        total = self._own_sum()
        if not total:
            yield
            return
        for summed in (gradient, parameter.grad):
            if summed is not None:
                summed.div_(total)
        yield
        if parameter.grad is not None:
            parameter.grad.mul_(total)

    def divide(self, gradients: Iterable[Tensor]) -> None:
        """Divides complete gradients in place by the sum of the weights, and collects anew."""
        own, self._collected = self._own_sum(), []
        total = self._average(own)
        if total:
            for gradient in gradients:
                gradient.div_(total)

    def _own_sum(self) -> float | None:
        # An exact sum, so that it does not depend on the order in which the weights came.
        return math.fsum(self._collected) if self._is_given else None

    def clear(self) -> None:
        """Forgets all weights, after a failure."""
        self._by_update.clear()
        self._collected = []


def mixed_weights() -> ValueError:
    """Creates the error that some losses have a weight and others have none."""
    return ValueError(
        "Some training steps returned a 'weight' beside their loss and others did not, so what they"
        " weigh together is unknown. Return it for each batch, on each rank:"
        " {'loss': loss, 'weight': n}, with the number n that the loss is a mean over; or never."
    )


class ReplicaWeights:
    """Averages weights over the replicas, and checks that all replicas have a weight or none has.

    A replica that has begun without weights goes on without weights (otherwise its last stage
    raises). So if the samples count, the replicas communicate only once.

    Args:
        group: The group of the replicas; takes CPU tensors.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._size = dist.get_world_size(group)
        self._have_none = False

    def average(self, weight: float | None) -> float | None:
        """Averages the weights of the replicas' shares. Collective: for each update.

        Raises:
            ValueError: Some replicas have a weight and others have none.
        """
        if self._size == 1 or (weight is None and self._have_none):
            return weight
        summed = torch.tensor([weight or 0.0, float(weight is not None)], dtype=torch.float64)
        dist.all_reduce(summed, group=self._group)
        total, given = summed.tolist()
        if given not in (0.0, float(self._size)):
            raise mixed_weights()
        self._have_none = given == 0.0
        return total / self._size if given else None
