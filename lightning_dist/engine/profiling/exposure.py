"""How long collectives took in a traced step, and how much of that nothing hid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_dist.engine.profiling.intervals import Interval, length, outside, overlap


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
