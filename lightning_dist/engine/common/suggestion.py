"""Phrases of an error about a name that fits nothing: what was near it, and what there is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


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
