"""Checks by a forward's source that it runs the blocks of a list one after the other.

A chain is one ``for`` over the list whose body calls a block with the output of the block before,
and uses that output for nothing else. Branches, experts and towers are lists too, but no chains.
Nor may a value pass around the blocks, as a skip connection does: a stage sends only the output of
a block. Code that is not clearly a chain counts as none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from torch import nn

from lightning_dist.engine.tensors.forward_ast import own_name, syntax_of


def loops_over(model: nn.Module, list_path: str) -> bool:
    """Returns whether a model's forward runs the blocks of a list as a chain, and only so."""
    code = syntax_of(type(model).forward)
    if code is None:
        return False
    own = own_name(code)
    wanted = f"{own}.{list_path}"
    if not own or sum(_is_attribute(node, wanted) for node in ast.walk(code)) != 1:
        return False
    body = getattr(code.body[0], "body", [])
    loops = [s for s in body if isinstance(s, ast.For) and _list_of(s.iter) == wanted]
    stores = (isinstance(node, ast.Attribute | ast.Subscript) for node in _stores(code))
    if not loops or any(stores) or own in _stored([code]):
        return False
    return _is_chain(model, own, body, loops[0])


def _is_chain(model: nn.Module, own: str, body: list[ast.stmt], loop: ast.For) -> bool:
    *_, block = (node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name))
    steps = [
        node
        for node in ast.walk(loop)
        if isinstance(node, ast.Assign) and _is_call_of(node.value, block)
    ]
    carried = _stored(steps[:1])
    if not carried or any(_stored([step]) != carried for step in steps):
        return False
    if not all(_loaded([step.value]) & carried for step in steps):
        return False
    index = body.index(loop)
    made, names = _made(body[:index], own) - carried, carried | {block}
    if _loaded(loop.body) & made or not _leaves_alone(model, own, loop, steps, names):
        return False
    return not _loaded(body[index + 1 :]) & (made | _stored([loop]) - carried)


def _made(statements: list[ast.stmt], own: str) -> set[str]:
    """Returns the names of values that the module's own parts may have computed."""
    made: set[str] = set()
    for statement in statements:
        names = _loaded([statement])
        if names & (made | {own}):
            # A bare call may store its arguments: `skips.append(x)`.
            made |= names - {own} if isinstance(statement, ast.Expr) else _stored([statement])
    return made


def _leaves_alone(
    model: nn.Module, own: str, loop: ast.For, steps: list[ast.Assign], names: set[str]
) -> bool:
    """Checks that a loop uses the module and some names in the blocks' calls only."""
    nodes = [node for statement in loop.body for node in ast.walk(statement)]
    numbers = {
        id(n.value) for n in nodes if isinstance(n, ast.Attribute) and _is_number(model, own, n)
    }
    in_steps = {id(node) for step in steps for node in ast.walk(step)}
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            if node.id == own and id(node) not in numbers:
                return False
            if node.id in names and id(node) not in in_steps:
                return False
    return True


def _is_number(model: nn.Module, own: str, node: ast.Attribute) -> bool:
    """Returns whether a node is ``self.training`` or another number of the module."""
    is_own = isinstance(node.value, ast.Name) and node.value.id == own
    return is_own and isinstance(getattr(model, node.attr, None), bool | int | float)


def _list_of(iterated: ast.expr) -> str:
    """Returns the code of the iterable of a loop, without ``enumerate``."""
    if isinstance(iterated, ast.Call) and ast.unparse(iterated.func) == "enumerate":
        iterated = iterated.args[0]
    return ast.unparse(iterated)


def _is_call_of(value: ast.expr, block: str) -> bool:
    """Returns whether a value is ``block(x)``, ``block(x)[0]`` or ``checkpoint(block, x)``."""
    call = value.value if isinstance(value, ast.Subscript) else value
    if not isinstance(call, ast.Call):
        return False
    return any(isinstance(n, ast.Name) and n.id == block for n in (call.func, *call.args[:1]))


def _is_attribute(node: ast.AST, path: str) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == path


def _stores(code: ast.AST) -> Iterator[ast.AST]:
    return (n for n in ast.walk(code) if isinstance(getattr(n, "ctx", None), ast.Store))


def _stored(statements: Iterable[ast.AST]) -> set[str]:
    return {n.id for s in statements for n in _stores(s) if isinstance(n, ast.Name)}


def _loaded(statements: Iterable[ast.AST]) -> set[str]:
    names = (n for s in statements for n in ast.walk(s) if isinstance(n, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Load)}
