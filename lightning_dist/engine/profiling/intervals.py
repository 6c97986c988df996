"""Lengths of times that overlap."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]
"""Begin and end."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Joins what overlaps or touches.

    Args:
        intervals: In any order; empty ones are left out.

    Returns:
        In order, with gaps between.
    """
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    """Adds up how long at least one of some intervals lasts."""
    return sum(end - start for start, end in union(intervals))


def outside(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """Gives what of some intervals none of others hides, in order.

    Args:
        intervals: What is left.
        others: What hides it.
    """
    hidden = union(others)
    left: list[Interval] = []
    for start, end in union(intervals):
        for hides_from, hides_to in hidden:
            if hides_to <= start or hides_from >= end:
                continue
            if hides_from > start:
                left.append((start, hides_from))
            start = hides_to
        if start < end:
            left.append((start, end))
    return left


def overlap(intervals: Iterable[Interval], others: Iterable[Interval]) -> float:
    """Adds up how long at least one of some intervals and one of others last at a time.

    Args:
        intervals: The ones.
        others: The others.
    """
    ones, twos = union(intervals), union(others)
    return length(ones) + length(twos) - length([*ones, *twos])


def length_outside(intervals: Iterable[Interval], others: Iterable[Interval]) -> float:
    """Adds up how long at least one of some intervals lasts while none of others does.

    Args:
        intervals: What is counted.
        others: What hides it.
    """
    hidden = union(others)
    return length([*union(intervals), *hidden]) - length(hidden)
