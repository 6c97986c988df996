"""Facts about a module that are read from its forward's source, as a syntax tree.

*Widths.* On a rank with some of the heads, a module must not compute with the width of its input,
which is that of all heads: ``width // self.num_heads`` would be a larger head
(:mod:`.layers.own_width`). *Order.* Submodules run in the order in which the code first mentions
them; without source, in the order of registration. *Written attributes.* A loss that a mixture of
experts stores exists only on a rank that has run the module. The code of ``forward`` and of the
methods that it mentions is read; ``setattr`` with a computed name goes unseen.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from textwrap import dedent
from typing import Any

from torch import nn


def syntax_of(function: Any) -> ast.Module | None:
    """Parses a function's source, beneath its decorators; None for a value without source."""
    try:
        return ast.parse(dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None


def own_name(code: ast.Module) -> str:
    """Returns the name that a method gives its own object, mostly ``self``; empty for none."""
    functions = (n for n in ast.walk(code) if isinstance(n, ast.FunctionDef | ast.Lambda))
    method = next(functions, None)
    names = [] if method is None else [*method.args.posonlyargs, *method.args.args]
    return names[0].arg if names else ""


def runs_before(module: nn.Module, name: str, other: str) -> bool:
    """Returns whether a module's forward runs one of its submodules before another one."""
    mentioned = used_by_forward(type(module)) or ()
    if name in mentioned and other in mentioned:
        return mentioned.index(name) < mentioned.index(other)
    registered = [*module._modules]
    return registered.index(name) < registered.index(other)


def _used(node: ast.AST, own: str) -> Iterator[str]:
    """Yields the attributes of a method's own object in the order in which they are used."""
    parts = ast.iter_child_nodes(node)
    if isinstance(node, ast.Call):  # self.head(self.body(x)): the body runs first
        parts = iter((*node.args, *node.keywords, node.func))
    for part in parts:
        yield from _used(part, own)
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == own:
        yield node.attr


def used_by_forward(kind: type, method: str = "forward") -> tuple[str, ...] | None:
    """Names the attributes of its own object that a forward uses, in the order of their first use.

    A method's are in place of its name, those of a base class's method ahead of the others. None if
    the forward, or another method that is asked for, has no source.
    """
    return _used_by(kind, method)


@cache
def _used_by(kind: type, method: str) -> tuple[str, ...] | None:
    found: list[str] = []

    def visit(name: str, classes: Sequence[type], inside: tuple[str, ...]) -> bool:
        definers = [place for place, class_ in enumerate(classes) if name in vars(class_)]
        code = syntax_of(vars(classes[definers[0]])[name]) if definers else None
        if code is None:
            return False
        if any(isinstance(node, ast.Name) and node.id == "super" for node in ast.walk(code)):
            visit(name, classes[definers[0] + 1 :], inside)
        for used in _used(code, own_name(code)):
            if used in inside or not visit(used, kind.__mro__, (*inside, name)):
                found.append(used)
        return True

    return tuple(dict.fromkeys(found)) if visit(method, kind.__mro__, ()) else None


_CHANGES = frozenset({"add", "append", "appendleft", "clear", "extend", "insert", "update"})


@cache
def written_by_forward(kind: type) -> frozenset[str]:
    """Names the attributes, of the module or of another object, that a forward changes."""
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
    return frozenset(written - {""})


def _written_at(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return [node.attr]
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return [_attribute_name(node.value)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method = node.func.attr
        in_place = method.endswith("_") and not method.startswith("_")
        return [_attribute_name(node.func.value)] if in_place or method in _CHANGES else []
    return []


_LAST = (-1, 2)  # of batch, sequence and features


def mixes_widths(
    module: nn.Module, head_counts: Collection[str], own_widths: Collection[str], features: int
) -> bool:
    """Returns whether a module's forward seems to compute with the width of all heads.

    Args:
        module: Any module.
        head_counts: Names of attributes that count heads.
        own_widths: Names of attributes that will be the width of a rank's own heads.
        features: Width of all heads; any other attribute of this value counts as that width.

    Returns:
        Whether it does; True if there is no source.
    """
    code = syntax_of(type(module).forward)
    return (
        code is None
        or any(
            _divides(node, head_counts)
            or (_attribute_name(node) not in own_widths and _is_width(node, module, features))
            for node in ast.walk(code)
        )
        or any(_widths_in_use(code))
    )


def reads_width(module: nn.Module) -> bool:
    """Returns whether a forward reads the width of its input; False for one without source."""
    code = syntax_of(type(module).forward)
    if code is None:
        return False
    return any(_widths_in_use(code)) or any(_widths_asked(code, input_name(module)))


def input_name(module: nn.Module) -> str:
    """Returns the name of the first argument of a module's forward; empty if there is none."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return "".join(named[1:2])


def attributes_read(module: nn.Module) -> set[str]:
    """Returns the names of all attributes, of any object, that a module's forward reads."""
    code = syntax_of(type(module).forward)
    return set() if code is None else {_attribute_name(node) for node in ast.walk(code)}


def attributes_computed_with(module: nn.Module) -> set[str]:
    """Returns the names of attributes, of any object, that a module's forward decides with.

    These are in an operation, a comparison or a condition, or choose an item. What is only passed
    on, as the place of a layer to a cache, is not.
    """
    code = syntax_of(type(module).forward)
    nodes = () if code is None else ast.walk(code)
    values = ast.BinOp | ast.BoolOp | ast.Compare | ast.UnaryOp
    choices = ast.If | ast.IfExp | ast.Subscript | ast.While
    operations = (node for node in nodes if isinstance(node, values | choices))
    return {_attribute_name(part) for node in operations for part in ast.iter_child_nodes(node)}


def _divides(node: ast.AST, head_counts: Collection[str]) -> bool:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.FloorDiv | ast.Div):
        return False
    # The queries for each key are the same number on all ranks.
    return (
        _attribute_name(node.right) in head_counts and _attribute_name(node.left) not in head_counts
    )


def _is_width(node: ast.AST, module: nn.Module, features: int) -> bool:
    name = _attribute_name(node)
    holders = (module, getattr(module, "config", None))
    values = [getattr(holder, name, None) for holder in holders] if name else []
    return any(type(value) is int and value == features for value in values)


def _widths_in_use(code: ast.AST) -> Iterator[str]:
    """Lists the names of last sizes, as in ``batch, length, width = x.shape``, that are read."""
    read = {
        node.id
        for node in ast.walk(code)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    for node in ast.walk(code):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            names = node.targets[0].elts
            is_shape = any(
                _attribute_name(part) in ("shape", "size") for part in ast.walk(node.value)
            )
            last = names[-1]
            is_of_three = len(names) == 3 or isinstance(names[0], ast.Starred)
            if is_shape and is_of_three and isinstance(last, ast.Name) and last.id in read:
                yield last.id


def _widths_asked(code: ast.AST, name: str) -> Iterator[ast.AST]:
    """Lists ``x.size(-1)``, ``x.shape[-1]``, and uses of a whole shape."""
    unpacked = [node.value for node in ast.walk(code) if isinstance(node, ast.Subscript)]
    unpacked += [node.value for node in ast.walk(code) if isinstance(node, ast.Assign)]
    for node in ast.walk(code):
        if isinstance(node, ast.Call) and _is_of(node.func, name, "size"):
            asked = [*node.args, *(keyword.value for keyword in node.keywords)]
            if any(map(_is_last, asked)) or (not asked and node not in unpacked):
                yield node
        elif isinstance(node, ast.Subscript) and _is_of(node.value, name, "shape"):
            if _is_last(node.slice):
                yield node
        elif _is_of(node, name, "shape") and node not in unpacked:
            yield node


def _is_of(node: ast.AST, name: str, attribute: str) -> bool:
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return False
    return node.attr == attribute and node.value.id == name


def _is_last(node: ast.AST) -> bool:
    try:
        return ast.literal_eval(node) in _LAST
    except (ValueError, TypeError):
        return False


def _attribute_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ""
