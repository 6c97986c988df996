"""The time of collectives in a traced step, and the *exposed* part, which no compute hid.

A trace has intervals that overlap: several collectives at once, kernels beside them. So times are
lengths of unions and differences of intervals, and no moment counts twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Interval = tuple[float, float]
"""Begin and end."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Joins intervals that overlap or touch, in order; empty ones are left out."""
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
    """Returns the length of the union of some intervals."""
    return sum(end - start for start, end in union(intervals))


def outside(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """Returns the parts of some intervals that are in none of the others, in order."""
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


@dataclass(frozen=True, slots=True)
class Exposure:
    """One rank's collectives in the batches that are traced.

    Attributes:
        seconds: Time for which any collective was under way.
        exposed_seconds: Time for which any collective was under way and this rank computed nothing.
        shares: Exposed time as a share of a part of the step, by the part's name. Tracing makes
            parts longer, so shares say more than seconds.
    """

    seconds: float = 0.0
    exposed_seconds: float = 0.0
    shares: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        collectives: Sequence[Interval],
        computing: Iterable[Interval],
        parts: Mapping[str, Sequence[Interval]],
    ) -> Exposure:
        """Creates it from intervals of collectives, of compute, and of a step's parts by name."""
        exposed = outside(collectives, computing)
        shares = {
            name: 1.0 - length(outside(part, exposed)) / length(part)
            for name, part in parts.items()
        }
        return cls(length(collectives), length(exposed), shares)
