"""The memory that a graph's operations write to, and the attributes that are its constants.

A value that is sent to another stage is a copy there, so a later write into one no longer shows in
the other. So the operations between the first and the last one on written memory must stay in one
layer.

A forward reads more than parameters, buffers and arguments: whether a part is in training, the rate
of a dropout, a number that the user raises from epoch to epoch. In a graph these are constants. So
graphs are keyed by these values, and when a value has changed, another graph is traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

Mode = tuple[tuple[Any, ...], ...]
"""Names and values of each part's attributes, in the order of ``modules()``."""


def mode_of(module: nn.Module) -> Mode:
    """Returns the public numbers, strings and flags of a module's parts."""
    return tuple(_public(part) for part in module.modules())


def set_mode(module: nn.Module, mode: Mode) -> None:
    """Sets the mode of a copy's parts to that of the original module."""
    for part, attributes in zip(module.modules(), mode, strict=True):
        for name in _public(part)[::2]:
            del part.__dict__[name]
        part.__dict__.update(_pairs(attributes))


def changed_attributes(module: nn.Module, mode: Mode) -> list[str]:
    """Names a module's attributes that differ from an earlier mode."""
    pairs = zip(module.named_modules(), mode, strict=True)
    return [
        f"{path}.{name}" if path else name
        for (path, part), attributes in pairs
        for name, _ in {*_pairs(_public(part))} ^ {*_pairs(attributes)}
    ]


def _public(part: nn.Module) -> tuple[Any, ...]:
    """Returns names and values in one flat tuple, for speed: it runs at each call."""
    return tuple(
        entry
        for item in part.__dict__.items()
        if type(item[1]) in _BUILT_IN and item[0][0] != "_"
        for entry in item
    )


def _pairs(attributes: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    return zip(attributes[::2], attributes[1::2], strict=True)


_BUILT_IN = frozenset({bool, int, float, str, type(None)})


# These write running statistics, which their schemas do not declare.
_NORMS = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)
_STATISTICS = ("running_mean", "running_var")


def memory_of(node: fx.Node) -> set[int]:
    """Returns the ids of the storages of a graph's node; a view has the storage of its base."""
    return {
        value.untyped_storage()._cdata
        for value in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(value, Tensor)
    }


def written_by(node: fx.Node) -> set[int]:
    """Returns the ids of the storages that the operation of a graph's node writes to."""
    return {memory for argument in _written_arguments(node) for memory in memory_of(argument)}


def _written_arguments(node: fx.Node) -> Iterator[fx.Node]:
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        # A block, under `no_grad` or autocast say, is a graph within the graph.
        if any(_writes_inside(argument) for argument in node.all_input_nodes):
            yield from node.all_input_nodes
    elif isinstance(node.target, torch._ops.OpOverload):
        for position, parameter in enumerate(node.target._schema.arguments):
            is_written = parameter.alias_info is not None and parameter.alias_info.is_write
            if is_written or (node.target in _NORMS and parameter.name in _STATISTICS):
                given = node.args[position : position + 1] or (node.kwargs.get(parameter.name),)
                yield from (a for a in pytree.tree_leaves(given[0]) if isinstance(a, fx.Node))


def _writes_inside(node: fx.Node) -> bool:
    if node.op != "get_attr":
        return False
    inner = getattr(node.graph.owning_module, str(node.target), None)
    if not isinstance(inner, fx.GraphModule):
        return False
    return any(any(True for _ in _written_arguments(n)) for n in inner.graph.nodes)
