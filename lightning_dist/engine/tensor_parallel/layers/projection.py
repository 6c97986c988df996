"""Layers that can be sharded by rows or columns: ``nn.Linear``, GPT-2's ``Conv1D``, embeddings.

The matrix of a ``Conv1D`` is transposed: its rows are the input features.
"""

from __future__ import annotations

from copy import copy
from typing import Any, TypeGuard

import torch.nn.functional as F
from torch import Tensor, nn


def is_token_table(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Returns whether a module looks each token up by itself, so that its rows can be sharded."""
    if not isinstance(module, nn.Embedding) or "weight" not in module._parameters:
        return False
    # Transformers has embeddings that scale their output, and others that shift the positions
    # in their input.
    is_plain = type(module).forward is nn.Embedding.forward or "Scaled" in type(module).__name__
    # These look at all tokens together, or write to the table.
    return is_plain and not (module.max_norm or module.scale_grad_by_freq or module.sparse)


def look_up(table: nn.Embedding, tokens: Tensor, rows: Tensor, first: int) -> Tensor:
    """Looks tokens up in some rows, with the table's own forward.

    Args:
        table: The embedding.
        tokens: Token indices from 0 to the number of rows.
        rows: Some rows of the table.
        first: Index in the table of the first of the rows.
    """
    stand_in: Any = copy(table)
    stand_in._parameters = {}
    stand_in.__dict__["weight"] = rows  # it is no parameter
    padding = -1 if table.padding_idx is None else table.padding_idx - first
    stand_in.padding_idx = padding if 0 <= padding < rows.shape[0] else None
    found: Tensor = type(table).forward(stand_in, tokens)
    return found


def is_projection(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Returns whether a module can be sharded by rows or columns."""
    if "weight" not in module._parameters:  # computed, by a parametrization
        return False
    if isinstance(module, nn.Linear):
        # One that computes something else, with an adapter for instance, would lose that.
        is_plain = type(module).forward is nn.Linear.forward
        return is_plain or type(module).__name__ == "FalconLinear"
    return _lies_across(module)


def has_own_forward(module: nn.Module) -> bool:
    """Returns whether a module has a forward of its own instance, as adapters set it."""
    return "forward" in vars(module)


def output_dim(layer: nn.Module) -> int:
    """Returns the weight's dim of the output features."""
    return 1 if _lies_across(layer) else 0


def input_dim(layer: nn.Module) -> int:
    """Returns the weight's dim of the input features."""
    return 1 - output_dim(layer)


def output_size(layer: nn.Module) -> int:
    """Returns the number of output features."""
    return _size(layer, output_dim(layer))


def input_size(layer: nn.Module) -> int:
    """Returns the number of input features."""
    return _size(layer, input_dim(layer))


def project(layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the layer's output with another weight.

    Args:
        layer: The projection, whose class decides whether the weight is transposed.
        x: Input of shape ``(..., in)``.
        weight: Weight in the layer's layout.
        bias: Bias of shape ``(out,)``, or None.

    Returns:
        Output of shape ``(..., out)``.
    """
    return F.linear(x, weight.T if _lies_across(layer) else weight, bias)


def _size(layer: nn.Module, dim: int) -> int:
    assert is_projection(layer)
    return int(layer.weight.shape[dim])


def _lies_across(module: nn.Module) -> bool:
    # By name, for transformers need not be installed.
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)
