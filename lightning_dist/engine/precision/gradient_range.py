"""How much of each layer's gradient the range of a half precision cuts off.

An element that is not finite has overflowed. One that is smaller than the smallest normal number
has lost digits, or all of them: whether a zero was a small number once, nobody can tell, so zeros
count too, and a layer behind a ReLU shows some at any scale. What tells is how the share changes
with the scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dist.engine.tensors.dtensor import local_part


@dataclass(frozen=True, slots=True)
class GradientRange:
    """Counts of a layer's gradient elements.

    Attributes:
        num_elements: All of them.
        num_overflowed: Infinite or nan.
        num_underflowed: Zero, or below the smallest normal number.
    """

    num_elements: int = 0
    num_overflowed: int = 0
    num_underflowed: int = 0

    def __add__(self, other: GradientRange) -> GradientRange:
        """Counts the elements of two parts together."""
        return GradientRange(
            self.num_elements + other.num_elements,
            self.num_overflowed + other.num_overflowed,
            self.num_underflowed + other.num_underflowed,
        )

    @property
    def overflow_share(self) -> float:
        """Between 0 and 1."""
        return self.num_overflowed / max(1, self.num_elements)

    @property
    def underflow_share(self) -> float:
        """Between 0 and 1."""
        return self.num_underflowed / max(1, self.num_elements)


Ranges = Mapping[str, GradientRange]
"""By dotted name of the layer."""


@torch.no_grad()
def measure(gradients: Mapping[str, Tensor], dtype: torch.dtype, scale: float) -> Ranges:
    """Counts elements; of shards, those of this rank.

    Args:
        gradients: By the parameter's dotted name, divided by the scale already.
        dtype: What they were computed in.
        scale: Of their loss.
    """
    least = torch.finfo(dtype).tiny / scale
    found: dict[str, GradientRange] = {}
    for name, gradient in gradients.items():
        layer, own = name.rpartition(".")[0], local_part(gradient)
        counts = GradientRange(
            own.numel(), int((~own.isfinite()).sum()), int((own.abs() < least).sum())
        )
        found[layer] = found.get(layer, GradientRange()) + counts
    return found


def merge(parts: Iterable[Ranges]) -> Ranges:
    """Adds what several ranks have counted; replicas count alike, so shares stay what they are.

    Args:
        parts: One of each rank.
    """
    total: dict[str, GradientRange] = {}
    for part in parts:
        for layer, counts in part.items():
            total[layer] = total.get(layer, GradientRange()) + counts
    return total
