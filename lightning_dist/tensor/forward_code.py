"""Read a module's forward, for what it would do wrong with some of the heads only.

On a rank with some of the heads a module must not compute with the width of its input, which is
that of all heads: ``width // self.num_heads`` would be a larger head, and ``view(batch, length,
width)`` an error.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from torch import nn

from lightning_dist.forward_source import syntax_of


def mixes_widths(
    module: nn.Module, head_counts: Collection[str], own_widths: Collection[str], features: int
) -> bool:
    """Whether a module's forward seems to compute with the width of all heads.

    Args:
        module: Any.
        head_counts: Names of attributes.
        own_widths: Names of attributes which will be the width of a rank's own heads.
        features: Of all heads together. Another attribute of that value is the width of all.

    Returns:
        True, too, where the code is not to be had.
    """
    code = syntax_of(type(module).forward)
    return (
        code is None
        or any(
            _divides(node, head_counts)
            or (_attribute(node) not in own_widths and _is_width(node, module, features))
            for node in ast.walk(code)
        )
        or any(_widths_in_use(code))
    )


def _divides(node: ast.AST, head_counts: Collection[str]) -> bool:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.FloorDiv | ast.Div):
        return False
    # The queries for each key are the same number on all ranks.
    return _attribute(node.right) in head_counts and _attribute(node.left) not in head_counts


def _is_width(node: ast.AST, module: nn.Module, features: int) -> bool:
    name = _attribute(node)
    holders = (module, getattr(module, "config", None))
    values = [getattr(holder, name, None) for holder in holders] if name else []
    return any(type(value) is int and value == features for value in values)


def _widths_in_use(code: ast.AST) -> Iterator[str]:
    """Lists what is read of the last size in ``batch, length, width = x.shape``."""
    read = {
        node.id
        for node in ast.walk(code)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    for node in ast.walk(code):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            names = node.targets[0].elts
            is_shape = any(_attribute(part) in ("shape", "size") for part in ast.walk(node.value))
            last = names[-1]
            if is_shape and len(names) == 3 and isinstance(last, ast.Name) and last.id in read:
                yield last.id


def _attribute(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ""
