"""Trees of tensors: batches and activations of any shape, taken apart and put together again.

The user's DataLoader yields batches, and layers return activations. Both are nested dicts, lists,
tuples, named tuples and dataclasses with tensors at some of the leaves. Code that splits a batch or
sends an activation works on the flat list of the tree's tensors, and leaves the rest, the
*skeleton*, alone. A skeleton can be pickled, so the transport sends it once as a header.

torch's own pytrees would do, but each user would have to register dataclasses first.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """The place of one tensor in a skeleton, by its position in the flat list of tensors."""

    index: int


def map_leaves(
    function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Rebuilds a tree with a function applied to each leaf.

    Args:
        function: Called with each leaf, in a fixed order: as stored for sequences, insertion order
            for mappings, field order for dataclasses.
        tree: Nested mappings, lists, tuples, named tuples and dataclass instances.
        is_leaf: Returns whether a container counts as a leaf; None for none.

    Returns:
        A tree of the same containers.
    """
    if isinstance(tree, Tensor) or (is_leaf is not None and is_leaf(tree)):
        return function(tree)

    def inside(value: Any) -> Any:
        return map_leaves(function, value, is_leaf)

    # First, for outputs of Hugging Face models are both, and as mappings they are read-only.
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type | Slot):
        fields = [field.name for field in dataclasses.fields(tree) if field.init]
        return dataclasses.replace(tree, **{name: inside(getattr(tree, name)) for name in fields})
    if isinstance(tree, Mapping):
        return _rebuild_mapping(tree, {key: inside(value) for key, value in tree.items()})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        # Not by the class itself, which may check its arguments, as a PackedSequence does.
        return tuple.__new__(type(tree), (inside(value) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(inside(value) for value in tree)
    return function(tree)


def _rebuild_mapping(original: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    if type(original) is dict:
        return items
    rebuilt = original.copy() if hasattr(original, "copy") else None
    if isinstance(rebuilt, dict):  # keeps a defaultdict's factory and an OrderedDict's class
        rebuilt.update(items)
        return rebuilt
    return type(original)(items)  # type: ignore[call-arg]


def tensors_in(tree: Any) -> list[Tensor]:
    """Lists a tree's tensors in the order of :func:`flatten`."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    # In the order of `map_leaves`, which would build each container anew.
    if isinstance(tree, Tensor):
        found.append(tree)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            if field.init:
                _collect(getattr(tree, field.name), found)
    elif isinstance(tree, Mapping):
        for value in tree.values():
            _collect(value, found)
    elif isinstance(tree, list | tuple):
        for value in tree:
            _collect(value, found)


def flatten(tree: Any) -> tuple[list[Tensor], Any]:
    """Returns a tree's tensors in a fixed order, and the tree with a :class:`Slot` for each."""
    tensors: list[Tensor] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return Slot(len(tensors) - 1)

    skeleton = map_leaves(take, tree)
    return tensors, skeleton


def unflatten(tensors: list[Tensor], skeleton: Any) -> Any:
    """Returns the tree of :func:`flatten` with other tensors, one per slot of the skeleton."""
    return map_leaves(
        lambda leaf: tensors[leaf.index] if isinstance(leaf, Slot) else leaf, skeleton
    )


def pickle_skeleton(value: Any) -> bytes:
    """Pickles a skeleton, or a tuple with one; ``pickle.loads`` reads it."""
    written = io.BytesIO()
    _SkeletonPickler(written).dump(value)
    return written.getvalue()


class _SkeletonPickler(pickle.Pickler):
    """Names what rebuilds a named tuple, as in :func:`map_leaves`: not the tuple's own class."""

    @override
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, tuple) and hasattr(obj, "_fields"):
            return _rebuild_named_tuple, (type(obj), *obj)
        return NotImplemented


def _rebuild_named_tuple(kind: type[tuple[Any, ...]], *items: Any) -> Any:
    return tuple.__new__(kind, items)


def own_copy(tree: Any) -> Any:
    """Returns a copy that other code may change; the tree itself if it cannot be copied.

    Not by :func:`map_tensors`: batches may be of any class, and tensors may have attributes.
    """
    try:
        return copy.deepcopy(tree)
    except Exception:  # of any class, by whatever is in it: a result of autograd, a lock
        return tree


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Rebuilds a tree with a function applied to each tensor; other leaves stay."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


class SwappedEntries:
    """Tensors that replace others in a tree's own lists, dicts and dataclass instances for a while.

    Code that holds these can go on to change them meanwhile: what is added stays.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Any, Any, Any]] = []  # a container, and what it had and has

    def swap(self, original: Any, rebuilt: Any) -> Any:
        """Puts what a function of this module has made of a tree into it, and returns the tree.

        Tuples and frozen dataclass instances are as rebuilt.
        """
        if original is rebuilt or type(original) is not type(rebuilt):
            return rebuilt
        if isinstance(original, tuple):
            return tuple.__new__(type(original), map(self.swap, original, rebuilt))
        before = _entries_of(original)
        if before is None:
            return rebuilt
        for key, new in (_entries_of(rebuilt) or {}).items():
            swapped = self.swap(before[key], new)
            if swapped is not before[key]:
                _set_entry(original, key, swapped)
                self._entries.append((original, before[key], swapped))
        return original

    def restore(self) -> None:
        """Puts the tensors that were there back in the places of those that replace them."""
        for container, own, swapped in self._entries:
            for key, value in (_entries_of(container) or {}).items():
                if value is swapped:
                    _set_entry(container, key, own)
        self._entries.clear()


def _entries_of(container: Any) -> dict[Any, Any] | None:
    """Returns what a container that can be changed holds, by key; None for anything else."""
    if dataclasses.is_dataclass(container) and not isinstance(container, type):
        if type(container).__dataclass_params__.frozen:  # type: ignore[attr-defined]
            return None
        names = [field.name for field in dataclasses.fields(container) if field.init]
        return {name: getattr(container, name) for name in names}
    if isinstance(container, dict):
        return dict(container)
    return dict(enumerate(container)) if isinstance(container, list) else None


def _set_entry(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, dict | list) and not dataclasses.is_dataclass(container):
        container[key] = value
    else:
        setattr(container, key, value)


def alias_of(tensor: Tensor) -> Tensor:
    """Returns a tensor with the same memory that autograd does not count as a view."""
    alias: Tensor = _Alias.apply(tensor)  # type: ignore[no-untyped-call]
    return alias


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
