"""Give layers what they may write into.

The tensors that a stage receives are leaves, so that their gradients can be asked for, and autograd
lets nobody write into a leaf in place, nor into a view of one. On a single device the same layer
(``nn.ReLU(inplace=True)``, say) would get the output of the one before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.data  # not a view in autograd's books

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def behind_leaf(tensor: Tensor) -> Tensor:
    """Gives the same memory as a tensor that is no leaf.

    Args:
        tensor: Any; what requires no gradient, or is no leaf, is returned as it is.
    """
    if not tensor.requires_grad or not tensor.is_leaf:
        return tensor
    alias: Tensor = _Alias.apply(tensor)  # type: ignore[no-untyped-call]
    return alias
