"""Count floating point operations by torch's formulas.

The formulas are those of ``torch.utils.flop_counter``, those too that users have added with its
``register_flop_formula``. Its own mode takes four times as long over a step, for it tries to take
each operation apart and knows the modules that it is in. Under it jagged tensors fail, and what is
compiled is not compiled any more, then or later.

How much is in a batch, as far as it says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

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


class FlopCounter:
    """Adds up what operations take that it is told of; those without a formula take nothing."""

    def __init__(self) -> None:
        self._formulas = FlopCounterMode(display=False).flop_registry
        self.flops = 0

    def counts(self, func: Any) -> bool:
        """Whether an operation has a formula.

        Args:
            func: Of torch.
        """
        return _packet(func) in self._formulas

    def __call__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Adds what an operation takes, if it has a formula.

        Args:
            func: Of torch.
            args: Its arguments.
            kwargs: Its arguments by name.
            result: What it returned.
        """
        formula = self._formulas.get(_packet(func))
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)


def _packet(func: Any) -> Any:
    """Gives the key of the formulas; higher-order operators are their own."""
    return getattr(func, "overloadpacket", func)
