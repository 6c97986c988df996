"""A number of something that a user asks for.

Patterns for dotted names, part by part as in torch's ``parallelize_module``.

``*`` stands for one part of a name, or a piece of one: ``layers.*`` is each layer, and nothing
inside one.

Phrases of an error about a name that fits nothing: what was near it, and what there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import isfinite
from numbers import Integral, Real


def check_count(name: str, value: object, at_least: int = 1, *, instead: str = "") -> None:
    """Checks a number of things.

    Args:
        name: Of the argument.
        value: Its value.
        at_least: The least number.
        instead: What else it may be, such as ``"'auto'"``.

    Raises:
        ValueError: It is no integer of at least so much.
    """
    is_number = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_number or value < at_least:  # type: ignore[operator]
        others = f"{instead} or " if instead else ""
        raise ValueError(f"{name}={value!r} must be {others}an integer of at least {at_least}.")


def check_positive(name: str, value: object) -> None:
    """Checks an amount.

    Args:
        name: Of the argument.
        value: Its value.

    Raises:
        ValueError: It is no finite number above zero.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not isfinite(value) or value <= 0:  # type: ignore[arg-type, operator]
        raise ValueError(f"{name}={value!r} must be a number above 0.")


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


def nearest(wanted: str, available: Iterable[str]) -> str:
    """Asks whether one of the most similar names, in any case, was meant; empty if none is similar.

    Args:
        wanted: What was given.
        available: What there is.
    """
    names: dict[str, list[str]] = {}
    for name in dict.fromkeys(available):
        names.setdefault(name.casefold(), []).append(name)
    near = [
        name for folded in get_close_matches(wanted.casefold(), names) for name in names[folded]
    ]
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def shorten(entries: Sequence[str], max_shown: int = 12) -> str:
    """Lists the first entries and counts the rest.

    Args:
        entries: What to list.
        max_shown: The longest list that is shown.
    """
    more = len(entries) - max_shown
    rest = f" and {more} more" if more > 0 else ""
    return (", ".join(entries[:max_shown]) or "none") + rest
