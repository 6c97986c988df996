"""Look tokens up in a part of a table."""

from __future__ import annotations

from copy import copy
from typing import Any, TypeGuard

from torch import Tensor, nn


def is_token_table(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether a module looks each token up by itself, so that its rows can be cut apart.

    Args:
        module: Any.
    """
    if not isinstance(module, nn.Embedding) or "weight" not in module._parameters:
        return False
    # Transformers has embeddings that scale what they find, and others that shift the positions
    # that they are given.
    is_plain = type(module).forward is nn.Embedding.forward or "Scaled" in type(module).__name__
    # These look at all tokens together, or write to the table.
    return is_plain and not (module.max_norm or module.scale_grad_by_freq or module.sparse)


def look_up(table: nn.Embedding, tokens: Tensor, rows: Tensor, first: int) -> Tensor:
    """Looks tokens up as the table would.

    Args:
        table: Says how.
        tokens: From 0 to the number of rows.
        rows: Some of the table's.
        first: Which of them all the first one is.
    """
    stand_in: Any = copy(table)
    stand_in._parameters = {}
    stand_in.__dict__["weight"] = rows  # it is no parameter
    padding = -1 if table.padding_idx is None else table.padding_idx - first
    stand_in.padding_idx = padding if 0 <= padding < rows.shape[0] else None
    found: Tensor = type(table).forward(stand_in, tokens)
    return found
