"""What a training step returns: a loss, and what it weighs.

Most losses are means over samples, so a micro-batch weighs by its samples. A loss that is a mean
over something else (the tokens that are not ignored, say) says what it weighs, by returning
``{"loss": ..., "weight": n}``: then the sum of all ``n * loss`` over the sum of all ``n`` is the
undivided batch's loss, and so it is with the gradients.

What the losses of an update weigh together, known on each stage when its gradients are complete.

Only the last stage sees what a step returns, and only at the end of an update is it known what all
of its micro-batches weigh. So each backward begins with its own micro-batch's weight as the scale,
the weight travels on with the gradients, and complete gradients are divided by the sum: over the
micro-batches, the batches that are accumulated, and the data replicas.

What the losses of an update weigh, over the data replicas.
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
        weight: What it is a mean over, in any unit; None where the samples count.
    """

    value: Tensor
    weight: float | None

    @classmethod
    def of(cls, result: Any) -> Loss:
        """Reads what a training step returned.

        Args:
            result: The loss, or a mapping with it under ``"loss"``, and maybe ``"weight"``.

        Raises:
            ValueError: There is no loss, or its weight is no number that can be one.
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
    """Gives what a step says that its loss weighs.

    Args:
        result: What the step returned.

    Returns:
        The number under ``"weight"``; None where there is none beside a loss.
    """
    if not isinstance(result, Mapping) or not {"loss", "weight"} <= result.keys():
        return None
    weight = result["weight"]
    if isinstance(weight, Tensor):
        return float(weight.detach()) if weight.numel() == 1 else None
    return float(weight) if isinstance(weight, Real) else None


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


class ReplicaWeights:
    """Averages weights over the replicas, and sees to it that all have some or none has.

    A replica that has begun without weights goes on without them (its last stage says so if not),
    so where the samples count, replicas speak about it once.

    Args:
        group: The replicas; takes CPU tensors.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._size = dist.get_world_size(group)
        self._have_none = False

    def average(self, weight: float | None) -> float | None:
        """Averages a weight; each replica must call it for each update.

        Args:
            weight: Of this replica's share; None where the samples count.

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
