"""Layers that can be cut by rows or columns: ``nn.Linear``, and GPT-2's ``Conv1D``.

The matrix of a ``Conv1D`` lies across: its rows are the input features.

Look tokens up in a part of a table.
"""

from __future__ import annotations

from copy import copy
from typing import Any, TypeGuard

import torch.nn.functional as F
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


def is_projection(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module can be cut by rows or columns.

    Args:
        module: Any.
    """
    if "weight" not in module._parameters:  # computed, by a parametrization
        return False
    if isinstance(module, nn.Linear):
        # One that computes something else, with an adapter for instance, would lose that.
        is_plain = type(module).forward is nn.Linear.forward
        return is_plain or type(module).__name__ == "FalconLinear"
    return _lies_across(module)


def has_own_forward(module: nn.Module) -> bool:
    """Whether somebody has replaced the forward of a module alone, as adapters do.

    Args:
        module: Any.
    """
    return "forward" in vars(module)


def output_dim(layer: nn.Module) -> int:
    """Gives the dim of the weight that counts the output features."""
    return 1 if _lies_across(layer) else 0


def input_dim(layer: nn.Module) -> int:
    """Gives the dim of the weight that counts the input features."""
    return 1 - output_dim(layer)


def output_size(layer: nn.Module) -> int:
    """Counts the output features."""
    return _size(layer, output_dim(layer))


def input_size(layer: nn.Module) -> int:
    """Counts the input features."""
    return _size(layer, input_dim(layer))


def project(layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Does what the layer does with another weight.

    Args:
        layer: Says how the weight lies.
        x: ``(..., in)``.
        weight: As the layer's.
        bias: ``(out,)`` or none.

    Returns:
        ``(..., out)``.
    """
    return F.linear(x, weight.T if _lies_across(layer) else weight, bias)


def _size(layer: nn.Module, dim: int) -> int:
    assert is_projection(layer)
    return int(layer.weight.shape[dim])


def _lies_across(module: nn.Module) -> bool:
    # By name, for transformers need not be installed.
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)
