"""State that users keep in attributes: found by name, compared with before, and replaced.

Users keep sums and samples in numbers, lists and arrays of the module, in those of a helper module,
and in plain objects such as an ``AverageMeter``. Each attribute there has a dotted name. What it
holds is compared after each step, so that must cost little: what has been replaced is another
object, a tensor counts the writes into it, containers are compared item by item.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_dist.engine.tensors.remote_tensor import RemoteTensor

_CONTAINERS = (list, dict, set, deque)
_FIXED = (int, float, complex, str, np.generic, type(None))
_VALUES = (*_FIXED, *_CONTAINERS, tuple, Tensor, np.ndarray)
_OTHERS = (nn.Module, pl.Trainer, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)

_DEPTH = 2  # objects in attributes of objects, lists of lists
_MOST_INSIDE = 32  # lists of a few loaders, dicts of a few names; longer ones are of samples
_MOST_COMPARED = 1024
_MOST_BYTES = 2**23  # a confusion matrix of 1000 classes

# Of torch, such as `nn.Linear`: no step changes their numbers.
_LAYERS = {each for each in vars(nn).values() if isinstance(each, type)}
_LAYERS -= {nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict}
_OF_LIGHTNING = frozenset(vars(pl.LightningModule()))
_OF_THIS_PACKAGE = "_lightning_dist_"  # names of its attributes begin so


def modules_beside(
    module: nn.Module, pipelined: Collection[nn.Module], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Yields the names and modules that may keep state, but for the pipelined ones.

    Nor are metrics among them, which are shared.
    """
    for name, child in module.named_children():
        if not isinstance(child, Metric | MetricCollection) and child not in pipelined:
            if type(child) not in _LAYERS:
                yield prefix + name, child
            yield from modules_beside(child, pipelined, f"{prefix}{name}.")


def attributes_of(module: nn.Module, beside: Iterable[tuple[str, nn.Module]]) -> dict[str, Any]:
    """Returns the values that users keep in a module, by their dotted names, outer ones first."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name, holder in (("", module), *beside):
        own = [each for each in vars(holder).items() if each[0] not in _OF_LIGHTNING]
        of_user = [each for each in own if not each[0].startswith(_OF_THIS_PACKAGE)]
        _find(of_user, f"{name}." if name else "", found, seen, _DEPTH)
    return found


def _find(
    named: Iterable[tuple[str, Any]], prefix: str, found: dict[str, Any], seen: set[int], depth: int
) -> None:
    for name, value in named:
        if isinstance(value, _VALUES):
            found[prefix + name] = value
        elif not isinstance(value, _OTHERS):
            found[prefix + name] = value
            if depth > 0 and id(value) not in seen:
                seen.add(id(value))
                _find(_state_of(value).items(), f"{prefix}{name}.", found, seen, depth - 1)


def _state_of(value: object) -> dict[str, Any]:
    """Returns the attributes of an object, those in ``__slots__`` too."""
    state: Any = object.__getstate__(value)
    if isinstance(state, tuple):
        own, in_slots = state
        return {**(own or {}), **in_slots}
    return state or {}


class _Same:
    """Items that are compared by identity, and so must live as long."""

    __slots__ = ("_items",)

    def __init__(self, items: tuple[Any, ...]) -> None:
        self._items = items

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Same)
        mine, others = self._items, other._items
        return len(mine) == len(others) and all(map(is_, mine, others))

    __hash__ = None  # type: ignore[assignment]


def mark(value: Any, depth: int = _DEPTH) -> Any:
    """Returns a mark that changes with in-place writes into a value.

    Args:
        value: The value of an attribute. What is in attributes of an object has names of its own.
        depth: How deep to look into containers, and into objects in them.
    """
    if isinstance(value, RemoteTensor):
        return None  # without values; a read of its version would be refused
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        return (value.shape, value.tobytes()) if value.nbytes <= _MOST_BYTES else None
    if isinstance(value, Mapping):
        inside = (*value.keys(), *value.values()) if len(value) <= _MOST_COMPARED else ()
    elif isinstance(value, (*_CONTAINERS, tuple)):
        inside = tuple(value) if len(value) <= _MOST_COMPARED else _last(value)
    elif depth < _DEPTH and not isinstance(value, (*_FIXED, *_OTHERS)):
        inside = tuple(_state_of(value).values())
    else:
        return None
    size = len(value) if isinstance(value, (*_CONTAINERS, tuple)) else len(inside)
    marks = None
    if depth > 0 and size <= _MOST_INSIDE:
        marks = [mark(each, depth - 1) for each in inside if not isinstance(each, _FIXED)]
    return size, _Same(inside), marks


def _last(value: Any) -> tuple[Any, ...]:
    return (value[-1],) if isinstance(value, list | deque | tuple) else ()


def can_be_sent(value: Any) -> bool:
    """Returns whether a copy of a value can be pickled."""
    try:
        torch.save(value, io.BytesIO())
    except Exception:  # any class may raise anything
        return False
    return True


def set_attribute_of(module: nn.Module, name: str, value: Any, *, is_new: bool = False) -> None:
    """Sets an attribute to what another rank has there, if this rank has what holds it.

    ``is_new`` says that it is another object there than before.
    """
    *path, attribute = name.split(".")
    holder: Any = module
    for step in path:
        holder = getattr(holder, step, None)
    if holder is None:
        return
    mine = getattr(holder, attribute, None)
    is_other = is_new and type(mine) is Tensor  # `self.before = self.now` may have the old one
    if type(mine) is type(value) and not is_other and _fill(mine, value):
        return  # others may have the same object
    if isinstance(holder, nn.Module):
        setattr(holder, attribute, value)
    else:
        object.__setattr__(holder, attribute, value)


def _fill(mine: Any, value: Any) -> bool:
    """Returns whether an object could be given the content of another one."""
    if isinstance(mine, np.ndarray):
        if (mine.shape, mine.dtype) != (value.shape, value.dtype) or not mine.flags.writeable:
            return False
        mine[...] = value
        return True
    if type(mine) is Tensor:  # a dataset or a sampler may read it
        is_free = mine.is_contiguous() and not (mine.requires_grad or mine.is_inference())
        if is_free and (mine.shape, mine.dtype) == (value.shape, value.dtype):
            mine.copy_(value)
            return True
        return False
    if not isinstance(mine, _CONTAINERS):
        return False
    mine.clear()
    if isinstance(mine, list | deque):
        mine.extend(value)
    else:
        mine.update(value)
    return True
