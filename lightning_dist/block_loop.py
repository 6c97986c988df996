"""Whether a forward runs the blocks of a list one after the other, as its code says.

As a person would who reads it: there is a ``for`` over the list, and its body gives a block what
the block before has returned. Branches, experts and towers are lists too, but not so.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torch import nn

from lightning_dist.forward_source import syntax_of


def loops_over(model: nn.Module, list_path: str) -> bool:
    """Whether a model's code runs the blocks of a list as a chain.

    Args:
        model: Holds the list; the loop may be in its forward or in that of a part around the list.
        list_path: Dotted path of the ``nn.ModuleList`` in it.
    """
    steps = list_path.split(".")
    for depth in range(len(steps)):
        holder = model.get_submodule(".".join(steps[:depth]))
        code = syntax_of(type(holder).forward)
        wanted = ".".join(["self", *steps[depth:]])
        if code is not None and any(_is_chain(loop) for loop in _loops(code, wanted)):
            return True
    return False


def _loops(code: ast.AST, wanted: str) -> Iterator[ast.For]:
    """Yields the loops over an attribute: as it is, or inside of ``enumerate`` or ``zip``."""
    for node in ast.walk(code):
        if isinstance(node, ast.For) and any(
            ast.unparse(part) == wanted for part in (node.iter, *_arguments(node.iter))
        ):
            yield node


def _arguments(node: ast.AST) -> list[ast.expr]:
    is_usual = isinstance(node, ast.Call) and ast.unparse(node.func) in ("enumerate", "zip")
    return node.args if is_usual else []  # type: ignore[attr-defined]


def _is_chain(loop: ast.For) -> bool:
    """Whether the body assigns what a call involving the block makes of the assigned name."""
    targets = _names(loop.target)
    for statement in ast.walk(loop):
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            call = statement.value
            assigned = {name for target in statement.targets for name in _names(target)}
            given = {name for part in (*call.args, *call.keywords) for name in _names(part)}
            if assigned & given and targets & (_names(call.func) | given):
                return True
    return False


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
