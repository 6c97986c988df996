"""A traced forward as a list of operations, and the places where it may be cut into layers.

A layer begins where a part of the module first uses its parameters: before each convolution or
norm, not among the operations after it. So the layers are in the order of the forward, for any
nesting of modules. Values that are alive between two layers (a skip connection) are passed on.

Some cuts would change the result. A parameter that is used twice belongs to one layer. So does
memory that is written in place, for a value sent to another stage is a copy.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

# Checks of the example's dtype and device, which would fail under autocast or on a GPU.
DROPPED = (torch.ops.aten._assert_tensor_metadata.default,)

# Names that torch gives to tensors that the forward makes from Python numbers.
_LIFTED = "lifted_tensor_"

# These write running statistics, which their schemas do not declare.
_NORMS = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)
_STATISTICS = ("running_mean", "running_var")


class UncuttableSpan(NamedTuple):
    """Operations, from a first to a last position, that must stay in one layer."""

    first: int
    last: int
    reason: str  # in words for the user

    def spans(self, start: int) -> bool:
        """Returns whether a layer that begins at a position would separate the operations."""
        return self.first < start <= self.last


@dataclass(frozen=True)
class TraceGraph:
    """A traced forward.

    Attributes:
        root: Module with the blocks that the graph calls.
        inputs: Placeholders of the leaves of a call.
        names: Names of parameters and buffers by placeholder.
        constants: Other tensors by placeholder.
        attributes: Names of the constants that are attributes of a part.
        parameters: Names of the parameters.
        body: The operations in their order, the output last.
        out_spec: Tree structure of the outputs.
    """

    root: nn.Module
    inputs: tuple[fx.Node, ...]
    names: Mapping[fx.Node, str]
    constants: Mapping[fx.Node, Any]
    attributes: Mapping[fx.Node, str]
    parameters: frozenset[str]
    body: tuple[fx.Node, ...]
    out_spec: Any

    def parameters_of(self, node: fx.Node) -> list[str]:
        """Names the parameters that an operation of the body uses."""
        return [name for name in self.held_by(node) if name in self.parameters]

    def held_by(self, node: fx.Node) -> list[str]:
        """Names the parameters and buffers that an operation of the body uses."""
        return [self.names[n] for n in node.all_input_nodes if n in self.names]

    def written(self, names: Mapping[fx.Node, str]) -> set[str]:
        """Returns those of some names, by placeholder, whose tensors the operations write to."""
        memory = {m for node in self.body for m in written_by(node)}
        return {name for node, name in names.items() if memory & memory_of(node)}

    def uncuttable(self) -> list[UncuttableSpan]:
        """Lists the operations that must stay in one layer."""
        return [*self._used_twice(), *self._written()]

    def _used_twice(self) -> list[UncuttableSpan]:
        uses: dict[str, list[int]] = {}
        for position, node in enumerate(self.body):
            for name in self.parameters_of(node):
                uses.setdefault(name, []).append(position)
        return [
            UncuttableSpan(at[0], at[-1], f"the parameter {name!r} is used more than once")
            for name, at in uses.items()
            if len(at) > 1
        ]

    def _written(self) -> list[UncuttableSpan]:
        """Lists the operations on written memory, from its creation to its last write."""
        # After it a value may be copied. A buffer may not, so there the last use counts.
        first: dict[int, int] = {m: 0 for node in self.inputs for m in memory_of(node)}
        titles = {node: repr(name) for node, name in self.names.items()}
        titles |= {node: f"the tensor {node.name!r}" for node in self.constants}
        kept = {memory: title for node, title in titles.items() for memory in memory_of(node)}
        last: dict[int, tuple[int, fx.Node]] = {}
        uses: dict[int, int] = {}
        for position, node in enumerate(self.body):
            for memory in {m for n in (node, *node.all_input_nodes) for m in memory_of(n)}:
                first.setdefault(memory, position)
                uses[memory] = position
            last |= dict.fromkeys(written_by(node), (position, node))
        return [
            UncuttableSpan(
                first.get(memory, 0),
                uses[memory] if memory in kept else position,
                f"{kept.get(memory, 'a value')} is written to in place{_line_of(node)}",
            )
            for memory, (position, node) in last.items()
        ]


def graph_of(program: ExportedProgram, canonical: Mapping[str, str]) -> TraceGraph:
    """Returns the graph of an exported program, by the first names of parameters and buffers."""
    placeholders = program.graph.find_nodes(op="placeholder")
    pairs = list(zip(placeholders, program.graph_signature.input_specs, strict=True))
    held = [(n, spec) for n, spec in pairs if spec.kind.name in ("PARAMETER", "BUFFER")]
    parameters = {canonical[str(s.target)] for _, s in held if s.kind.name == "PARAMETER"}
    others = {"USER_INPUT", "PARAMETER", "BUFFER"}
    body = [n for n in program.graph.nodes if n.op in ("call_function", "output")]
    others_at = {n: str(s.target) for n, s in pairs if s.kind.name not in others}
    return TraceGraph(
        root=program.graph_module,
        inputs=tuple(n for n, spec in pairs if spec.kind.name == "USER_INPUT"),
        names={n: canonical[str(spec.target)] for n, spec in held},
        constants={n: program.constants[name] for n, name in others_at.items()},
        attributes={
            n: t for n, t in others_at.items() if not t.rpartition(".")[2].startswith(_LIFTED)
        },
        parameters=frozenset(parameters),
        body=tuple(n for n in body if n.target not in DROPPED),
        out_spec=program.call_spec.out_spec,
    )


def find_anchors(graph: TraceGraph, module: nn.Module) -> set[str]:
    """Returns the parameters and buffers whose first uses begin layers: those of one part.

    A norm counts its batches before it uses its weight, so its buffers are anchors, too. A constant
    that many parts use is none.
    """
    owners = {_owner_of(name) for name in graph.parameters}
    return {
        name
        for name in graph.names.values()
        if name in graph.parameters
        or (_owner_of(name) in owners and not _has_parts(module, _owner_of(name)))
    }


def homes_of_idle_buffers(homes: Mapping[str, int], module: nn.Module) -> dict[str, int]:
    """Returns the layers of buffers that have none, as those of norms that are frozen at first.

    Each belongs to the layer of its part's parameters, for later graphs that use it.

    Args:
        homes: The layer of each parameter, and of buffers that belong to one layer.
        module: The traced module.
    """
    of_parts: dict[str, set[int]] = {}
    for name, _ in module.named_parameters():
        of_parts.setdefault(_owner_of(name), set()).add(homes[name])
    return {
        name: min(found)
        for name, _ in module.named_buffers()
        if name not in homes
        and len(found := of_parts.get(_owner_of(name), set())) == 1
        and not _has_parts(module, _owner_of(name))
    }


def find_starts(
    graph: TraceGraph, module: nn.Module, anchors: Collection[str]
) -> tuple[list[int], list[str]]:
    """Returns the positions at which the layers of a graph begin.

    Returns:
        Position of the first operation of each layer, and the reasons for omitted cuts.
    """
    starts, owners = [0], set[str]()
    for position, node in enumerate(graph.body):
        found = {_owner_of(name) for name in graph.held_by(node) if name in anchors}
        # A module with parts is not one step of the forward because it has parameters of its own.
        is_new = found != owners or any(_has_parts(module, owner) for owner in found)
        if found and owners and is_new:
            starts.append(position)
        owners = found or owners
    uncuttable = graph.uncuttable()
    reasons = dict.fromkeys(t.reason for t in uncuttable if any(map(t.spans, starts)))
    kept = [start for start in starts if not any(t.spans(start) for t in uncuttable)]
    return kept, list(reasons)


def assign_starts(graph: TraceGraph, homes: Mapping[str, int], num_layers: int) -> list[int]:
    """Returns the positions at which known layers begin in another graph of the same module.

    Args:
        graph: The trace in another mode.
        homes: The layer of each parameter, and of buffers that belong to one layer.
        num_layers: Number of layers; some may have no operations in this mode.

    Raises:
        ValueError: The graph's operations are in another order.
    """
    starts, layer = [0], 0
    for position, node in enumerate(graph.body):
        for name in graph.held_by(node):
            home = homes.get(name, layer)
            if home < layer:
                raise ValueError(
                    f"The forward uses {name!r} earlier in training than in this mode, so its"
                    " layers have no one order. Let it run its parts in one order, whatever"
                    " `self.training` is."
                )
            starts += [position] * (home - layer)
            layer = home
    starts += [len(graph.body)] * (num_layers - len(starts))
    for t in graph.uncuttable():
        if any(map(t.spans, starts[1:])):
            raise ValueError(
                f"In this mode {t.reason}, across layers that are apart in training. Write out of"
                " place there."
            )
    return starts


def parts_of(graph: TraceGraph, starts: Sequence[int]) -> list[tuple[fx.Node, ...]]:
    """Returns the operations of each layer."""
    return [graph.body[start:end] for start, end in pairwise([*starts, len(graph.body)])]


def titles_of(graph: TraceGraph, starts: Sequence[int]) -> list[str]:
    """Names each layer by the first part that uses its parameters; see :func:`parts_of`."""
    titles = []
    for nodes in parts_of(graph, starts):
        names = [name for node in nodes for name in graph.parameters_of(node)]
        titles.append((_owner_of(names[0]) or names[0]) if names else "")
    return titles


def _owner_of(name: str) -> str:
    # A parametrized weight is made from parameters that belong to the module all the same.
    return name.rpartition(".")[0].partition(".parametrizations")[0]


def _has_parts(module: nn.Module, owner: str) -> bool:
    if not owner:
        return True
    children = module.get_submodule(owner).named_children()
    return any(name != "parametrizations" for name, _ in children)


def _line_of(node: fx.Node) -> str:
    """Names the line of the user's code that an operation comes from, as torch has noted it."""
    found = re.findall(r'File "(.+)", line (\d+), .*\n\s*(.+)', node.meta.get("stack_trace") or "")
    return " at {}:{}, `{}`".format(*found[-1]) if found else ""


def memory_of(node: fx.Node) -> set[int]:
    """Returns the ids of the storages of a graph's node; a view has the storage of its base."""
    return {
        value.untyped_storage()._cdata
        for value in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(value, Tensor)
    }


def written_by(node: fx.Node) -> set[int]:
    """Returns the ids of the storages that the operation of a graph's node writes to."""
    if isinstance(node.target, HigherOrderOperator):
        # A block, under `no_grad` or autocast say, is a graph within the graph.
        inner = {m for argument in node.all_input_nodes for m in _written_inside(argument)}
        return inner & {m for argument in node.all_input_nodes for m in memory_of(argument)}
    return {memory for argument in _written_arguments(node) for memory in memory_of(argument)}


def _written_arguments(node: fx.Node) -> Iterator[fx.Node]:
    if isinstance(node.target, torch._ops.OpOverload):
        for position, parameter in enumerate(node.target._schema.arguments):
            is_written = parameter.alias_info is not None and parameter.alias_info.is_write
            if is_written or (node.target in _NORMS and parameter.name in _STATISTICS):
                given = node.args[position : position + 1] or (node.kwargs.get(parameter.name),)
                yield from (a for a in pytree.tree_leaves(given[0]) if isinstance(a, fx.Node))


def _written_inside(node: fx.Node) -> set[int]:
    if node.op != "get_attr":
        return set()
    inner = getattr(node.graph.owning_module, str(node.target), None)
    if not isinstance(inner, fx.GraphModule):
        return set()
    return {memory for inside in inner.graph.nodes for memory in written_by(inside)}
