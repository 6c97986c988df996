"""Restore a module's state after a step that may have changed it.

A step may count, append to a list, or update a metric; norms update their statistics. All of that
is in the attributes of the modules, so the attributes are saved and restored. Tensors, lists,
dicts, sets and deques are restored in place, with their contents. Parameters are left alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def state_kept(module: nn.Module) -> Iterator[None]:
    """Restores the attributes of a module and of its submodules at the end."""
    undo = [step for part in module.modules() for step in _undo_changes(vars(part))]
    try:
        yield
    finally:
        with torch.no_grad():
            for step in undo:
                step()


def _undo_changes(value: Any) -> Iterator[Callable[[], object]]:
    """Yields the calls that restore a value and what it contains."""
    inside: Iterable[Any] = ()
    if isinstance(value, nn.Parameter):
        return
    if isinstance(value, Tensor) and not value.is_meta:
        yield partial(value.detach().copy_, value.detach().clone())
    elif isinstance(value, dict):
        items = dict(value)
        inside = items.values()
        yield from (value.clear, partial(value.update, items))
    elif isinstance(value, list | deque):
        inside = list(value)
        yield from (value.clear, partial(value.extend, inside))
    elif isinstance(value, set):
        yield from (value.clear, partial(value.update, set(value)))
    for item in inside:
        yield from _undo_changes(item)
