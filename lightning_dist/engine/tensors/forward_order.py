"""In which order a module's forward comes to its submodules, as its code says.

As a person would who reads it: where a submodule is first mentioned, in the class's own forward or
in the one that it extends. Where neither mentions both, or the code is not to be had, the order in
which they were registered decides.
"""

from __future__ import annotations

import ast
from typing import Any

from torch import nn
from typing_extensions import override

from lightning_dist.engine.tensors.forward_source import syntax_of


def runs_before(module: nn.Module, name: str, other: str) -> bool:
    """Whether a module's forward comes to one of its submodules before another.

    Args:
        module: What holds both.
        name: Of the one.
        other: Of the other.
    """
    for class_ in type(module).__mro__:
        mentioned = _mentions(vars(class_).get("forward"))
        if name in mentioned and other in mentioned:
            return mentioned.index(name) < mentioned.index(other)
    registered = [child for child, _ in module.named_children()]
    return registered.index(name) < registered.index(other)


def _mentions(forward: Any) -> list[str]:
    reader = _Reader()
    code = syntax_of(forward)
    if code is not None:
        reader.visit(code)
    return list(dict.fromkeys(reader.names))


class _Reader(ast.NodeVisitor):
    """Collects the attributes of ``self`` in the order in which they are used."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @override
    def visit_Call(self, node: ast.Call) -> None:
        # self.head(self.body(x)): the body runs first.
        for part in (*node.args, *node.keywords, node.func):
            self.visit(part)

    @override
    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            self.names.append(node.attr)
