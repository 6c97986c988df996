"""What a training step returns: a loss, and what it weighs.

Most losses are means over samples, so a micro-batch weighs by its samples. A loss that is a mean
over something else (the tokens that are not ignored, say) says what it weighs, by returning
``{"loss": ..., "weight": n}``: then the sum of all ``n * loss`` over the sum of all ``n`` is the
undivided batch's loss, and so it is with the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

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
