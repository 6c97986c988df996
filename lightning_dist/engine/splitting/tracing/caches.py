"""Tensors that a forward keeps in an attribute, such as a mask for the length of the last sequence.

A graph assigns no attribute. If the tensor follows from the sizes of the inputs alone, nothing is
lost by that: each call makes it anew, as the first one did. Any other tensor may be used outside of
the forward, or by the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node


def follow_from_sizes(
    module: nn.Module, names: Sequence[str], trace: Callable[[], ExportedProgram]
) -> bool:
    """Returns whether tensors that a forward assigns follow from the sizes of its inputs alone.

    Args:
        module: The module that is traced.
        names: The attributes, such as ``self.mask`` or ``self.encoder.mask``.
        trace: Traces the module for the sizes of an example. The result has the attributes, too.
    """
    if not all(name.startswith("self.") and "[" not in name for name in names):
        return False  # an entry of a list, say, which the forward may grow
    held = [attrgetter(name.removeprefix("self.")) for name in names]

    def add_assigned(root: nn.Module, _: Any, result: Any) -> Any:
        return result, [get(root) for get in held]

    hook = module.register_forward_hook(add_assigned)
    try:
        program = trace()
    finally:
        hook.remove()
    graph = program.run_decompositions({}).graph  # nothing is written in place
    results = graph.output_node().args[0]
    assert isinstance(results, tuple)
    return not any(map(_is_a_value, _ancestors(results[-len(held) :])))


def _ancestors(nodes: Iterable[Any]) -> set[Node]:
    """Returns nodes, and all that they are computed from."""
    found: set[Node] = set()
    left = [node for node in nodes if isinstance(node, Node)]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def _is_a_value(node: Node) -> bool:
    """Returns whether a node begins with values: a tensor that the module has, or random ones."""
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return node.op != "call_function" or is_random
