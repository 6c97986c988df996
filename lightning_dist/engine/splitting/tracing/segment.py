"""One layer of a traced forward: some of its operations, as code.

A layer's input is a tuple of the earlier layers' values that this layer or a later one needs. So a
skip connection passes through the layers between its ends like any activation, over any number of
stages, and its gradient comes back the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from lightning_dist.engine.splitting.tracing.graph import TraceGraph, parts_of


@dataclass(frozen=True)
class Segment:
    """A layer.

    Attributes:
        code: Module that takes the values, the tensors of :attr:`names`, and the device.
        names: Names of the layer's parameters and buffers.
        takes: Indices of the call's leaves that the first layer takes; None on other layers, which
            take the output of the layer before.
        out_spec: Tree structure of the outputs, on the last layer.
    """

    code: fx.GraphModule
    names: tuple[str, ...]
    takes: tuple[int, ...] | None
    out_spec: Any

    def run(self, values: Sequence[Any], tensors: Mapping[str, Tensor]) -> Any:
        """Runs the layer.

        Args:
            values: The leaves of a call on the first layer; else the output of the layer before.
            tensors: Tensors by name, at least those of :attr:`names`.

        Returns:
            A tuple for the next layer, or the forward's result.
        """
        taken = values if self.takes is None else [values[index] for index in self.takes]
        own = [tensors[name] for name in self.names]
        tensors_of_call = [t for t in pytree.tree_leaves([*own, *taken]) if isinstance(t, Tensor)]
        device = tensors_of_call[0].device if tensors_of_call else torch.device("cpu")
        outputs = self.code(*taken, *own, device)
        return outputs if self.out_spec is None else pytree.tree_unflatten(outputs, self.out_spec)


def cut_graph(graph: TraceGraph, starts: Sequence[int], device: torch.device) -> list[Segment]:
    """Cuts a graph into layers.

    Args:
        graph: The trace.
        starts: Position of the first operation of each layer.
        device: Device of the trace. Operations that create a tensor on it create the tensor on the
            layer's device instead.
    """
    parts = parts_of(graph, starts)
    alive = _alive_before(graph, parts)
    segments = []
    for index, nodes in enumerate(parts):
        is_last = index == len(parts) - 1
        returned = graph.body[-1].args[0] if is_last else tuple(alive[index + 1])
        used = dict.fromkeys(n for node in nodes for n in node.all_input_nodes)
        held = [n for n in used if n in graph.names]
        operations = [n for n in nodes if n.op != "output"]
        code = _compile(graph, operations, [*alive[index], *held], returned, device)
        takes = tuple(graph.inputs.index(n) for n in alive[0]) if index == 0 else None
        names = tuple(graph.names[n] for n in held)
        out_spec = graph.out_spec if is_last else None
        segments.append(Segment(code=code, names=names, takes=takes, out_spec=out_spec))
    return segments


def _alive_before(graph: TraceGraph, parts: Sequence[Sequence[fx.Node]]) -> list[list[fx.Node]]:
    """Lists, for each layer, the earlier values that this layer or a later one uses."""
    order = {n: i for i, n in enumerate([*graph.inputs, *graph.body])}
    alive: list[list[fx.Node]] = []
    needed: set[fx.Node] = set()
    for nodes in reversed(parts):
        needed |= {n for node in nodes for n in node.all_input_nodes if n in order}
        needed -= set(nodes)
        alive.append(sorted(needed, key=order.__getitem__))
    return alive[::-1]


def _compile(
    graph: TraceGraph,
    operations: Sequence[fx.Node],
    taken: Sequence[fx.Node],
    returned: Any,
    device: torch.device,
) -> fx.GraphModule:
    """Creates a module that takes values and a device, and runs the operations of a layer."""
    code = fx.Graph()
    copies = {node: code.placeholder(node.name) for node in taken}
    here = code.placeholder("device")
    root: dict[str, Any] = {}

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:
            is_block = node.op == "get_attr"
            name = str(node.target) if is_block else node.name
            root[name] = getattr(graph.root, name) if is_block else graph.constants[node]
            copies[node] = code.get_attr(name)
        return copies[node]

    def moved(leaf: Any) -> Any:
        return here if leaf == device and isinstance(leaf, torch.device) else leaf

    for node in operations:
        copy = code.node_copy(node, copy_of)
        copy.args, copy.kwargs = pytree.tree_map(moved, (copy.args, copy.kwargs))
        copy.meta = {}  # values of the example, and what it takes to make them
        copies[node] = copy
    code.output(fx.node.map_arg(returned, copy_of))
    return fx.GraphModule(root, code)
