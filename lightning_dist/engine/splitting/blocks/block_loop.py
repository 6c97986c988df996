"""Checks by a forward's source that it runs the blocks of a list one after the other.

A chain is one ``for`` over the list whose body calls a block with the output of the block before,
and uses that output for nothing else; or one call of an ``nn.Sequential``. Branches, experts and
towers are lists too, but no chains. Nor may a value pass around the blocks, as a skip connection
does: a stage sends only the output of a block. Code that is not clearly a chain counts as none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from torch import nn

from lightning_dist.engine.splitting.blocks.places_read import places_read
from lightning_dist.engine.tensors.forward_ast import own_name, syntax_of, used_by_forward

_Places: TypeAlias = set[tuple[int, str]]
"""Modules, and names in them, of the parameters that code reads."""


def loops_over(model: nn.Module, list_path: str) -> bool:
    """Returns whether a model's forward runs the blocks of a list as a chain, and only so.

    The same goes for one call of a method, or of a part, that so runs them. No parameter may be
    read both ahead of the blocks and behind them, for these are on other stages.
    """
    found = _read_around(model, list_path, "forward")
    return found is not None and not found[0] & found[1]


def _read_around(model: nn.Module, list_path: str, method: str) -> tuple[_Places, _Places] | None:
    """Returns what a method reads ahead of a chain of blocks and behind it; None for no chain."""
    kind: type = type(model)
    code = syntax_of(getattr(kind, method))
    own = "" if code is None else own_name(code)
    if code is None or not own or _hands_out(code, own):
        return None
    wanted = f"{own}.{list_path}"
    part, _, inner = list_path.partition(".")
    if not _mentions(code, [wanted]):
        users = _users_of(kind, part, code, own)
        if inner and _mentions(code, [f"{own}.{part}"]):
            outer = _read_around(model, part, method)
            within = _read_around(model.get_submodule(part), inner, "forward") if outer else None
        elif len(users) == 1:
            outer = _read_around(model, users[0], method)
            within = _read_around(model, list_path, users[0]) if outer else None
        else:
            return None
        if outer is None or within is None:
            return None
        return outer[0] | within[0], outer[1] | within[1]
    if sum(_is_attribute(node, wanted) for node in ast.walk(code)) != 1:
        return None
    body = getattr(code.body[0], "body", [])
    stores = (isinstance(node, ast.Attribute | ast.Subscript) for node in _stores(code))
    if any(stores) or own in _stored([code]):
        return None
    for index, statement in enumerate(body):
        ahead, behind = body[:index], body[index + 1 :]
        if isinstance(statement, ast.For) and _list_of(statement.iter) == wanted:
            if not _is_chain(model, own, body, statement):
                return None
            return places_read(model, own, ahead), places_read(model, own, behind)
        for call in _calls_in(statement, wanted):
            if not _hands_on(own, body, statement, call):
                return None
            rest = [*_without(statement, call), *behind]
            return places_read(model, own, [*ahead, *call.args]), places_read(model, own, rest)
    return None


def is_ahead(model: nn.Module, attribute: str, part: str, method: str = "forward") -> bool:
    """Returns whether a forward passes what it computes with an attribute to one of its parts.

    What a method computes with it counts. Where that is not clear, the order of their first uses
    decides.
    """
    kind: type = type(model)
    order = used_by_forward(kind, method) or ()
    code = syntax_of(getattr(kind, method))
    if code is None or part not in order:
        return True
    if attribute not in order:
        return False  # steps alone use it, behind the model
    own, made = own_name(code), set[str]()
    wanted = f"{own}.{part}"
    if not _mentions(code, [wanted]):
        users = _users_of(kind, part, code, own)
        inside = [user for user in users if attribute in (used_by_forward(kind, user) or ())]
        if inside:
            return is_ahead(model, attribute, part, inside[0])
        # Else another method runs the part, or the method of this name of the base class.
        wanted = f"{own}.{users[0]}" if users else f"super().{method}"
    elif order.index(part) < order.index(attribute):
        return False
    uses = [f"{own}.{name}" for name in _users_of(kind, attribute, code, own)]
    for statement in getattr(code.body[0], "body", []) if _mentions(code, uses) else ():
        if _mentions(statement, [wanted]):
            arguments = [
                argument for call in _calls_in(statement, wanted) for argument in call.args
            ]
            given: list[ast.AST] = [*arguments] or [statement]
            return any(_mentions(each, uses) for each in given) or bool(_loaded(given) & made)
        if _mentions(statement, uses) or _loaded([statement]) & made:
            made |= _written(statement, own)
    return order.index(attribute) < order.index(part)


def _users_of(kind: type, attribute: str, code: ast.AST, own: str) -> list[str]:
    """Returns what code names of an object's own attribute, and of methods that use it."""
    nodes = (node for node in ast.walk(code) if isinstance(node, ast.Attribute))
    names = dict.fromkeys(node.attr for node in nodes if ast.unparse(node.value) == own)
    return [n for n in names if attribute in (n, *(used_by_forward(kind, n) or ()))]


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


def _hands_on(own: str, body: list[ast.stmt], statement: ast.stmt, call: ast.Call) -> bool:
    """Returns whether nothing but its own result passes by the call of a sequence."""
    made = _made(body[: body.index(statement)], own)
    others = [*call.args[1:], *(keyword.value for keyword in call.keywords)]
    if _loaded(others) & (made | {own}):
        return False
    of_call = {id(node) for node in ast.walk(call)}
    beside = (n for n in ast.walk(statement) if id(n) not in of_call and isinstance(n, ast.Name))
    behind = _loaded(body[body.index(statement) + 1 :])
    names = {name.id for name in beside if isinstance(name.ctx, ast.Load)}
    return not (names | behind - _stored([statement])) & made


def _made(statements: list[ast.stmt], own: str) -> set[str]:
    """Returns the names of values that the module's own parts may have computed."""
    made: set[str] = set()
    for statement in statements:
        names = _loaded([statement])
        if names & (made | {own}):
            made |= _written(statement, own)
    return made


def _written(statement: ast.stmt, own: str) -> set[str]:
    """Returns the names that a statement may give values to."""
    written = _stored([statement])
    for node in ast.walk(statement):
        is_item = isinstance(node, ast.Subscript | ast.Attribute) and isinstance(
            node.ctx, ast.Store
        )
        # A bare call may store its arguments: `skips.append(x)`.
        if is_item or isinstance(node, ast.Expr):
            written |= _loaded([node]) - {own}
    return written


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


def _without(statement: ast.AST, call: ast.Call) -> Iterator[ast.AST]:
    """Yields the largest pieces of a statement that do not contain a call."""
    for child in ast.iter_child_nodes(statement):
        if any(node is call for node in ast.walk(child)):
            yield from () if child is call else _without(child, call)
        else:
            yield child


def _hands_out(code: ast.AST, own: str) -> bool:
    """Returns whether code passes its object itself on, so that its parts may be read unseen."""
    names = sum(isinstance(n, ast.Name) and n.id == own for n in ast.walk(code))
    attributes = (node for node in ast.walk(code) if isinstance(node, ast.Attribute))
    return names != sum(ast.unparse(node.value) == own for node in attributes)


def _calls_in(statement: ast.stmt, wanted: str) -> list[ast.Call]:
    """Lists the calls of a part, or of an item of it, in a simple statement."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return):
        return []
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) == wanted]


def _mentions(node: ast.AST, wanted: Sequence[str]) -> bool:
    return any(_is_attribute(part, path) for part in ast.walk(node) for path in wanted)


def _is_attribute(node: ast.AST, path: str) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == path


def _stores(code: ast.AST) -> Iterator[ast.AST]:
    return (n for n in ast.walk(code) if isinstance(getattr(n, "ctx", None), ast.Store))


def _stored(statements: Iterable[ast.AST]) -> set[str]:
    return {n.id for s in statements for n in _stores(s) if isinstance(n, ast.Name)}


def _loaded(statements: Iterable[ast.AST]) -> set[str]:
    names = (n for s in statements for n in ast.walk(s) if isinstance(n, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Load)}
