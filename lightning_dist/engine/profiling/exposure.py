"""How long collectives took in a traced step, and how much of that nothing hid.

Lengths of times that overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True)
class Exposure:
    """One rank's collectives in one step.

    Attributes:
        seconds_by_kind: How long at least one of a kind was under way.
        seconds: How long any was.
        exposed_seconds: How long any was while this rank computed nothing.
        shares: What share of a part of the step they were exposed, by the part's name. Tracing
            makes parts longer, so shares say more than seconds.
    """

    seconds_by_kind: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    shares: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        collectives: Mapping[str, Sequence[Interval]],
        computing: Iterable[Interval],
        parts: Mapping[str, Sequence[Interval]],
    ) -> Exposure:
        """Compares when collectives were under way with when there was something to compute.

        Args:
            collectives: In seconds, by kind.
            computing: In seconds.
            parts: Of the step, in seconds, by name.
        """
        every = [interval for intervals in collectives.values() for interval in intervals]
        exposed = outside(every, computing)
        return cls(
            {kind: length(intervals) for kind, intervals in collectives.items()},
            length(every),
            length(exposed),
            {name: overlap(exposed, part) / length(part) for name, part in parts.items()},
        )
