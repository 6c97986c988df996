"""Patterns for dotted names, part by part as in torch's ``parallelize_module``.

``*`` stands for one part of a name, or a piece of one: ``layers.*`` is each layer, and nothing
inside one.
"""

from __future__ import annotations

from fnmatch import fnmatchcase


def fits(name: str, pattern: str) -> bool:
    """Whether a dotted name fits a pattern.

    Args:
        name: Of a module.
        pattern: As for :mod:`fnmatch`, with as many parts.
    """
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def with_stars(name: str) -> str:
    """Gives the pattern that stands for a name and its likes in other layers.

    Args:
        name: Of a module.
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
