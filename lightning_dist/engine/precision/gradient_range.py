"""The share of each layer's gradient that is outside of a half precision's range.

An element that is not finite has overflowed. An element below the smallest normal number has lost
some or all of its digits. A zero may have been a small number once, so zeros count too, and a layer
behind a ReLU has some at any scale. So look at how the share changes with the scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dist.engine.tensors.dtensor import local_part


@dataclass(frozen=True, slots=True)
class GradientRange:
    """Counts of a layer's gradient elements."""

    num_elements: int = 0
    num_overflowed: int = 0
    num_underflowed: int = 0

    def __add__(self, other: GradientRange) -> GradientRange:
        """Returns the counts of two parts together."""
        return GradientRange(
            self.num_elements + other.num_elements,
            self.num_overflowed + other.num_overflowed,
            self.num_underflowed + other.num_underflowed,
        )

    @property
    def overflow_share(self) -> float:
        """The share of overflowed elements, between 0 and 1."""
        return self.num_overflowed / max(1, self.num_elements)

    @property
    def underflow_share(self) -> float:
        """The share of underflowed elements, between 0 and 1."""
        return self.num_underflowed / max(1, self.num_elements)


Ranges = Mapping[str, GradientRange]
"""Counts by the layer's dotted name."""


@torch.no_grad()
def measure(gradients: Mapping[str, Tensor], dtype: torch.dtype, scale: float) -> Ranges:
    """Counts the elements of gradients; of a sharded gradient, this rank's elements.

    Args:
        gradients: Gradients by the parameter's dotted name, divided by the scale already.
        dtype: Dtype in which the gradients were computed.
        scale: Scale of the loss.
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
    """Adds the counts of several ranks; replicas have equal counts, so the shares do not change."""
    total: dict[str, GradientRange] = {}
    for part in parts:
        for layer, counts in part.items():
            total[layer] = total.get(layer, GradientRange()) + counts
    return total
