"""Layers that can be cut by rows or columns: ``nn.Linear``, and GPT-2's ``Conv1D``.

The matrix of a ``Conv1D`` lies across: its rows are the input features.
"""

from __future__ import annotations

from typing import TypeGuard

import torch.nn.functional as F
from torch import Tensor, nn


def is_projection(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module can be cut by rows or columns.

    Args:
        module: Any.
    """
    return isinstance(module, nn.Linear) or _lies_across(module)


def output_dim(layer: nn.Module) -> int:
    """Gives the dim of the weight that counts the output features."""
    return 1 if _lies_across(layer) else 0


def input_dim(layer: nn.Module) -> int:
    """Gives the dim of the weight that counts the input features."""
    return 1 - output_dim(layer)


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


def _lies_across(module: nn.Module) -> bool:
    # By name, for transformers need not be installed.
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)
