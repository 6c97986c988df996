"""How much is in a batch, as far as it says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_dist.engine.tensors.tree import flatten

_TOKENS = ("input_ids", "tokens")


def num_samples(batch: Any) -> int:
    """Counts samples by the first dim of the first tensor; 0 where there is none.

    Args:
        batch: Any tree.
    """
    sizes = (t.shape[0] for t in flatten(batch)[0] if t.dim() > 0)
    return next(sizes, 0)


def num_tokens(batch: Any) -> int | None:
    """Counts the elements of what a batch calls ``input_ids`` or ``tokens``; None without.

    Args:
        batch: A mapping, or an object with attributes.
    """
    for name in _TOKENS:
        found = batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)
        if isinstance(found, Tensor):
            return found.numel()
    return None
