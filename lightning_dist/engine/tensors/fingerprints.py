"""Numbers by which tensors are told apart without a copy: of their bits, or but for rounding.

A plain sum tells less than it seems to: a bias whose elements moved by the same amount, some up and
some down, keeps its sum. So each element counts with a weight that depends on its position as if
drawn at random.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_AT_ONCE = 2**20  # elements; what is computed of them takes 16 bytes for each
_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # of Fibonacci hashing (Knuth, vol. 3, 6.4), as signed bits
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> Tensor:
    """Returns a number of 64 bits, on a dense tensor's device, that changes with any element."""
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    bits = plain.detach().contiguous().flatten().view(_BITS[plain.element_size()])
    found = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part, weights in _weighted(bits):
        found = 31 * found + (part.to(torch.int64) * weights).sum()
    return found


def projection(tensor: Tensor) -> tuple[float, float]:
    """Returns the product of a dense, real tensor with a fixed random direction, and the norm.

    Tensors that are equal but for rounding have products that differ by little beside the norm.
    """
    product, square = 0.0, 0.0
    for part, weights in _weighted(tensor.detach().flatten()):
        values = part.to(torch.float64)
        product += float((values * (weights.to(torch.float64) / 2**63)).sum())
        square += float(values.square().sum())
    return product, square**0.5


def _weighted(flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, flat.numel(), _AT_ONCE):
        part = flat[start : start + _AT_ONCE]
        positions = torch.arange(start + 1, start + 1 + part.numel(), device=flat.device)
        weights = positions * _FACTOR
        yield part, weights ^ (weights >> 29)
