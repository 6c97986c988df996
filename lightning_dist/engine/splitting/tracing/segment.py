"""One layer of a traced forward: some of its operations, as code.

A layer's input is a tuple of the earlier layers' values that this layer or a later one needs. So a
skip connection passes through the layers between its ends like any activation, over any number of
stages, and its gradient comes back the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from lightning_dist.engine.splitting.tracing.graph import DROPPED, TraceGraph, parts_of

# Blocks that the forward runs under another grad mode or autocast: graphs within the graph.
_AUTOCAST = "wrap_with_autocast"
_BLOCKS = ("wrap_with_set_grad_enabled", _AUTOCAST)


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
        code = _Code(graph.root, graph.constants, device).compile(
            [*alive[index], *held], operations, returned
        )
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


class _Code:
    """Operations, of a trace on one device, that run on any device."""

    def __init__(
        self, origin: nn.Module, constants: Mapping[fx.Node, Any], device: torch.device
    ) -> None:
        self._origin, self._constants, self._device = origin, constants, device
        self._code = fx.Graph()
        self._root: dict[str, Any] = {}

    def compile(
        self, taken: Iterable[fx.Node], operations: Iterable[fx.Node], returned: Any
    ) -> fx.GraphModule:
        """Returns a module that takes some values, and at last a device."""
        self._copies = {node: self._code.placeholder(node.name) for node in taken}
        self._here = self._code.placeholder("device")
        for node in operations:
            if node.target not in DROPPED:
                self._add(node)
        self._code.output(fx.node.map_arg(returned, self._copy_of))
        return fx.GraphModule(self._root, self._code)

    def _add(self, node: fx.Node) -> None:
        copy = self._code.node_copy(node, self._copy_of)
        args, copy.kwargs = pytree.tree_map(self._moved, (copy.args, copy.kwargs))
        if str(node.target) in _BLOCKS:
            args = (*args, self._here)
        if str(node.target) == _AUTOCAST and args[0] == self._device.type:
            with self._code.inserting_before(copy):
                args = (self._code.call_function(_autocast_device, (self._here,)), *args[1:])
        copy.args = args
        copy.meta = {}  # values of the example, and what it takes to make them
        self._copies[node] = copy

    def _copy_of(self, node: fx.Node) -> fx.Node:
        if node not in self._copies:
            self._copies[node] = (
                self._block(node) if node.op == "get_attr" else self._constant(node)
            )
        return self._copies[node]

    def _block(self, node: fx.Node) -> fx.Node:
        name = str(node.target)
        block = getattr(self._origin, name)
        if all(str(user.target) in _BLOCKS for user in node.users):
            taken = block.graph.find_nodes(op="placeholder")
            run = [n for n in block.graph.nodes if n.op == "call_function"]
            inner = _Code(block, {}, self._device)
            block = inner.compile(taken, run, block.graph.output_node().args[0])
        self._root[name] = block
        return self._code.get_attr(name)

    def _constant(self, node: fx.Node) -> fx.Node:
        self._root[node.name] = constant = self._constants[node]
        found = self._code.get_attr(node.name)
        # A number goes with tensors on any device.
        is_array = isinstance(constant, Tensor) and constant.dim() > 0
        return self._code.call_method("to", (found, self._here)) if is_array else found

    def _moved(self, leaf: Any) -> Any:
        is_device = isinstance(leaf, torch.device) and leaf == self._device
        return self._here if is_device else leaf


def _autocast_device(device: torch.device) -> str:
    """Returns the device type of autocast for a layer; the meta device has none of its own."""
    return device.type if torch.amp.is_autocast_available(device.type) else "cpu"
