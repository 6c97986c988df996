"""The number of floating point operations by torch's formulas, and of a batch's samples and tokens.

The formulas are those of ``torch.utils.flop_counter``, with those that users have added by its
``register_flop_formula``. Torch's own ``FlopCounterMode`` makes a step four times as long, since it
tries to decompose each operation and tracks modules. Under that mode jagged tensors fail, and
compiled code is not compiled any more, then or later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_dist.engine.profiling.meters.traffic_counter import packet_of
from lightning_dist.engine.tensors.tree import flatten

_TOKENS = ("input_ids", "tokens")


def num_samples(batch: Any) -> int:
    """Counts samples by the first dim of a tree's first tensor; 0 if there is none."""
    sizes = (t.shape[0] for t in flatten(batch)[0] if t.dim() > 0)
    return next(sizes, 0)


def num_tokens(batch: Any) -> int | None:
    """Counts the elements of a batch's ``input_ids`` or ``tokens``; None without such a tensor."""
    for name in _TOKENS:
        found = batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)
        if isinstance(found, Tensor):
            return found.numel()
    return None


class FlopCounter:
    """Sums the FLOPs of operations; those without a formula count nothing."""

    def __init__(self) -> None:
        self._formulas = FlopCounterMode(display=False).flop_registry
        self.flops = 0

    def counts(self, func: Any) -> bool:
        """Returns whether an operation of torch has a formula."""
        return packet_of(func) in self._formulas

    def __call__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Adds the FLOPs of an operation that has a formula, given its arguments and result."""
        formula = self._formulas.get(packet_of(func))
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
