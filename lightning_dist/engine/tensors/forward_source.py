"""The source of a function as a syntax tree, for those who read a module's forward."""

from __future__ import annotations

import ast
import inspect
from textwrap import dedent
from typing import Any


def syntax_of(function: Any) -> ast.Module | None:
    """Parses a function's source, beneath its decorators.

    Args:
        function: Any; what is no function has no source.

    Returns:
        None where the source is not to be had.
    """
    try:
        return ast.parse(dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None
