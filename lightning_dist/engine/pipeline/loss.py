"""A training step's result: a loss and its weight.

Most losses are means over samples, so a micro-batch weighs by its samples. If a loss is a mean over
something else (the tokens that are not ignored, say), the step returns its weight, too:
``{"loss": ..., "weight": n}``. Then the undivided batch's loss is the sum of all ``n * loss`` over
the sum of all ``n``. The same holds for the gradients.

:class:`LossWeights` sums the weights of an update's losses, on each stage.

Only the last stage sees a step's result, and the sum of the weights is known only at the end of an
update. So each backward begins with its own micro-batch's weight as the scale, and the weight
travels on with the gradients. Complete gradients are divided by the sum of the weights: over the
micro-batches, the accumulated batches, and the data replicas.

:class:`ReplicaWeights` averages the weights over the data replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Loss:
    """A micro-batch's loss.

    Attributes:
        value: A tensor of one element.
        weight: What the loss is a mean over, in any unit; None if the samples count.
    """

    value: Tensor
    weight: float | None

    @classmethod
    def of(cls, result: Any) -> Loss:
        """Creates the loss from a training step's result.

        Args:
            result: The loss, or a mapping with the loss under ``"loss"``, and maybe ``"weight"``.

        Raises:
            ValueError: There is no loss, or its weight is not a finite number of at least zero.
        """
        value = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                "A training step must return its loss, a tensor of one element, or a dict with it"
                f" under 'loss', but returned {got}. Skipping a step by returning None is not"
                " possible in a pipeline: return a loss of zero instead."
            )
        if not isinstance(result, Mapping) or "weight" not in result:
            return cls(value, None)
        weight = weight_of(result)
        if weight is None or not math.isfinite(weight) or weight < 0.0:
            raise ValueError(
                f"A training step returned 'weight': {result['weight']!r} beside its loss. That is"
                " what the loss is a mean over (how many tokens, say): one finite number that is"
                " not negative. Call it by another name if it means something else."
            )
        return cls(value, weight)


def weight_of(result: Any) -> float | None:
    """Returns the weight of a loss in a step's result.

    Args:
        result: The step's result.

    Returns:
        The number under ``"weight"``; None if there is none beside a loss.
    """
    if not isinstance(result, Mapping) or not {"loss", "weight"} <= result.keys():
        return None
    weight = result["weight"]
    if isinstance(weight, Tensor):
        return float(weight.detach()) if weight.numel() == 1 else None
    return float(weight) if isinstance(weight, Real) else None


AverageWeight = Callable[[float | None], float | None]
"""Takes the weight of an update's losses on this replica, None if the samples count; returns the
average over the replicas."""


@dataclass(frozen=True, slots=True)
class WeighedGradients:
    """The message from a stage to the stage before.

    Attributes:
        gradients: One gradient for each received tensor that requires grad.
        weight: Weight of the micro-batch's loss, a zero-dim float64 tensor; None if the samples
            count.
    """

    gradients: list[Tensor | None]
    weight: Tensor | None = None

    @classmethod
    def of_loss(cls, gradients: list[Tensor | None], weight: float | None) -> WeighedGradients:
        """Creates the gradients with which a backward begins.

        Args:
            gradients: Gradients of the roots.
            weight: Weight of the loss; None if the samples count.
        """
        tensor = None if weight is None else torch.tensor(weight, dtype=torch.float64)
        return cls(gradients, tensor)


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

    def note(self, update: int, index: int, weight: Tensor | float | None) -> None:
        """Remembers the weight of a micro-batch; each stage of a rank may call it.

        Args:
            update: Index of the update that the micro-batch's gradients are for.
            index: The micro-batch.
            weight: Weight of the micro-batch's loss; None if the samples count.

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
        """Adds an update's weights to those that :meth:`divide` divides by.

        Args:
            update: Index of the update, for which no more weights come.
        """
        self._collected += self._by_update.pop(update, {}).values()

    def divide(self, gradients: Iterable[Tensor]) -> None:
        """Divides complete gradients by the sum of the weights, and begins to collect anew.

        Args:
            gradients: Gradients of the weighted sum, changed in place; zero if all weights are.
        """
        # An exact sum, so that it does not depend on the order in which the weights came.
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
        """Averages a weight. Collective: every replica must call it for each update.

        Args:
            weight: Weight of this replica's share; None if the samples count.

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
