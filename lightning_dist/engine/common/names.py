"""Checks of numbers that a user passes, patterns for dotted names, and phrases for errors.

Patterns match part by part, as in torch's ``parallelize_module``. ``*`` stands for one part of a
name, or a piece of one: ``layers.*`` is each layer, and nothing inside a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import isfinite
from numbers import Integral, Real


def check_count(name: str, value: object, at_least: int = 1, *, instead: str = "") -> None:
    """Checks that an argument is an integer of at least some value.

    Raises:
        ValueError: The value is no integer, or too small; ``instead`` are other allowed values.
    """
    is_number = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_number or value < at_least:  # type: ignore[operator]
        others = f"{instead} or " if instead else ""
        raise ValueError(f"{name}={value!r} must be {others}an integer of at least {at_least}.")


def check_positive(name: str, value: object) -> None:
    """Checks that an argument is a finite number above zero.

    Raises:
        ValueError: The value is no finite number above zero.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not isfinite(value) or value <= 0:  # type: ignore[arg-type, operator]
        raise ValueError(f"{name}={value!r} must be a number above 0.")


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Checks that an argument is one of some values.

    Raises:
        ValueError: The value is none of them.
    """
    if value not in (known := tuple(choices)):
        raise ValueError(f"{name}={value!r} is unknown; use one of {known}.")


def fits(name: str, pattern: str) -> bool:
    """Returns whether a dotted name matches a dotted pattern, by part as for :mod:`fnmatch`."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def with_stars(name: str) -> str:
    """Returns the pattern of a dotted name, with ``*`` for each number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def nearest(wanted: str, available: Iterable[str]) -> str:
    """Returns a question that suggests similar names, in any case; empty if none is similar."""
    names: dict[str, list[str]] = {}
    for name in dict.fromkeys(available):
        names.setdefault(name.casefold(), []).append(name)
    near = [
        name for folded in get_close_matches(wanted.casefold(), names) for name in names[folded]
    ]
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def shorten(entries: Sequence[str], max_shown: int = 12) -> str:
    """Lists the first entries, up to ``max_shown``, and counts the rest."""
    more = len(entries) - max_shown
    rest = f" and {more} more" if more > 0 else ""
    return (", ".join(entries[:max_shown]) or "none") + rest
