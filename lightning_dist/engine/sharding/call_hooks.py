"""Hooks around calls of sharded modules, by which arguments and results are the user's own.

FSDP2 hooks into the autograd graph before and after each call. So it rebuilds lists and dicts of
arguments that have tensors with gradients, and what a block appends to one would be lost. And a
write into a view that a root returns would remove its hooks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.engine.tensors.dtensor import is_dtensor
from lightning_dist.engine.tensors.tree import SwappedEntries, alias_of, map_tensors

Call = tuple[tuple[Any, ...], dict[str, Any]]


def keep_containers(module: nn.Module) -> None:
    """Lets a module be called with the lists and dicts that the user passes; call it behind FSDP2.

    For the call they have the tensors that other hooks have put into copies of them.
    """
    given: list[Call] = []
    swapped: list[SwappedEntries] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given[:] = [(args, kwargs)]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def swap(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        swapped.append(SwappedEntries())
        own: Call = swapped[-1].swap(given.pop(), (args, kwargs))
        return own

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def restore(*_: object) -> None:
        swapped.pop().restore()

    module.register_forward_pre_hook(note, prepend=True, with_kwargs=True)
    module.register_forward_pre_hook(swap, with_kwargs=True)
    module.register_forward_hook(restore, prepend=True)


def return_no_views(root: nn.Module) -> None:
    """Replaces views in what a root will return: by a write into one FSDP2 would lose its hooks."""

    def alias(tensor: Tensor) -> Tensor:
        # Of others autograd goes on to notice a write that would change their gradient.
        is_view = tensor.requires_grad and tensor._is_view() and not is_dtensor(tensor)
        return alias_of(tensor) if is_view else tensor

    def replace_views(module: nn.Module, given: Any, output: Any) -> Any:
        return map_tensors(alias, output)

    root.register_forward_hook(replace_views)
