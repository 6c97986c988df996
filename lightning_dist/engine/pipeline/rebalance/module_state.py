"""Restore a module's state after a step that may have changed it.

A step may count, append to a list, or update a metric; norms update their statistics. All of that
is in the attributes of the modules, so the attributes are saved and restored. Tensors, lists,
dicts, sets and deques are restored in place, with their contents. Parameters are left alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_Undo = Callable[[], object]


@contextmanager
def state_kept(module: nn.Module) -> Iterator[None]:
    """Restores the attributes of a module and of its submodules at the end.

    Args:
        module: Any module.
    """
    undo = [_keep(vars(part)) for part in module.modules()]
    try:
        yield
    finally:
        with torch.no_grad():
            for put_back in undo:
                put_back()


def _keep(value: Any) -> _Undo:
    """Returns the callable that restores a value."""
    if isinstance(value, nn.Parameter):
        return _nothing
    if isinstance(value, Tensor):
        return _keep_tensor(value)
    if isinstance(value, dict):
        items = dict(value)
        return _refill(value.clear, lambda: value.update(items), items.values())
    if isinstance(value, list | deque):
        entries = list(value)
        return _refill(value.clear, lambda: value.extend(entries), entries)
    if isinstance(value, set):
        members = set(value)
        return _refill(value.clear, lambda: value.update(members), ())
    return _nothing


def _keep_tensor(tensor: Tensor) -> _Undo:
    if tensor.is_meta:
        return _nothing
    copy = tensor.detach().clone()
    return lambda: tensor.detach().copy_(copy)


def _refill(clear: _Undo, fill: _Undo, inside: Any) -> _Undo:
    undo = [clear, fill, *map(_keep, inside)]
    return lambda: [put_back() for put_back in undo]


def _nothing() -> None: ...
