"""Which attributes a module's forward writes, as its code says.

A mixture of experts leaves its balancing loss in an attribute, an attention its last map. Such a
value is there where the module has run, and nowhere else. Read is what ``forward`` says, and the
methods that it mentions; ``setattr`` with a name made at run time goes unseen.
"""

from __future__ import annotations

import ast
from functools import cache

from torch import nn

from lightning_dist.engine.tensors.forward_source import syntax_of

_CHANGES = frozenset({"add", "append", "appendleft", "clear", "extend", "insert", "update"})


@cache
def written_by_forward(kind: type) -> frozenset[str]:
    """Names the attributes, its own or another object's, that a forward assigns or changes.

    Args:
        kind: The module's class.
    """
    classes = [c for c in kind.__mro__ if issubclass(c, nn.Module) and c is not nn.Module]
    written: set[str] = set()
    read, waiting = set[str](), ["forward"]
    while waiting:
        name = waiting.pop()
        if name in read:
            continue
        read.add(name)
        for class_ in classes:
            code = syntax_of(vars(class_).get(name))
            if code is not None:
                nodes = list(ast.walk(code))
                written.update(attribute for node in nodes for attribute in _written_at(node))
                waiting += [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    return frozenset(written)


def _written_at(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return [node.attr]
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return _attribute(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method = node.func.attr
        in_place = method.endswith("_") and not method.startswith("_")
        return _attribute(node.func.value) if in_place or method in _CHANGES else []
    return []


def _attribute(node: ast.AST) -> list[str]:
    return [node.attr] if isinstance(node, ast.Attribute) else []
