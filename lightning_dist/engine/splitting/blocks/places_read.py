"""Which parameters code reads, by the modules that hold them.

A weight that an embedding and a head share is in two places, so each may be on a stage of its own.
Methods and properties of a module are followed, and nothing is run.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from lightning_dist.engine.tensors.forward_ast import own_name, syntax_of

_DESCRIBES = frozenset({"device", "dtype", "dim", "is_cuda", "ndim", "numel", "shape", "size"})


def places_read(model: nn.Module, own: str, nodes: Iterable[ast.AST]) -> set[tuple[int, str]]:
    """Returns the modules, by their ids, and the names in them, of parameters that code reads.

    Args:
        model: The object of the code.
        own: What the code calls it, as ``self``.
        nodes: The code.
    """
    return {place for node in nodes for place in _read(model, own, node, set())}


def _read(
    model: nn.Module, own: str, code: ast.AST, seen: set[tuple[int, str]]
) -> Iterator[tuple[int, str]]:
    for path in _longest_paths(code, own):
        holder: nn.Module = model
        for name, following in zip(path, (*path[1:], ""), strict=True):
            parameter, module = holder._parameters.get(name), holder._modules.get(name)
            if parameter is not None:
                if parameter.requires_grad and following not in _DESCRIBES:  # others are everywhere
                    yield id(holder), name
                break
            if module is None:
                yield from _read_by_method(holder, name, seen)
                break
            if not following:
                for part in module.modules():
                    names = (name for name, _ in part.named_parameters(recurse=False))
                    yield from ((id(part), key) for key in names)
            holder = module


def _read_by_method(
    holder: nn.Module, name: str, seen: set[tuple[int, str]]
) -> Iterator[tuple[int, str]]:
    method: Any = inspect.getattr_static(type(holder), name, None)
    code = syntax_of(method.fget if isinstance(method, property) else method)
    if code is not None and (id(holder), name) not in seen:
        seen.add((id(holder), name))
        yield from _read(holder, own_name(code), code, seen)


def _longest_paths(node: ast.AST, own: str) -> Iterator[list[str]]:
    """Yields the paths of attributes that code reads of its object."""
    part, path = node, list[str]()
    while isinstance(part, ast.Attribute):
        path.append(part.attr)
        part = part.value
    if path and isinstance(part, ast.Name):
        if part.id == own:
            yield path[::-1]
        return
    for child in ast.iter_child_nodes(part):
        yield from _longest_paths(child, own)
