"""Tensors that begin another part of an autograd graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def cut_from_graph(tensor: Tensor) -> Tensor:
    """Returns a leaf with the same memory."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def copy_of(tensor: Tensor) -> Tensor:
    """Returns a leaf with memory of its own."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def behind_leaf(tensor: Tensor) -> Tensor:
    """Returns an alias of a leaf, with the same memory, that layers may write into."""
    # Autograd refuses to write in place into a leaf, and received tensors are leaves. On one device
    # `nn.ReLU(inplace=True)`, say, gets the previous layer's output, which is no leaf.
    if not tensor.requires_grad or not tensor.is_leaf:
        return tensor
    alias: Tensor = _Alias.apply(tensor)  # type: ignore[no-untyped-call]
    return alias


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.data  # not a view in autograd's books

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
