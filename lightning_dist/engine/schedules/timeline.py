"""Timelines, measured by the runtime or predicted by the simulator, with one type for both.

Code that draws, compares or summarises a timeline need not know where the timeline came from.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from typing_extensions import override

from lightning_dist.engine.schedules.actions import Action, ActionKind


class SpanKind(StrEnum):
    """What a rank does during a span."""

    COMPUTE = "compute"
    """A forward, a backward or a part of one."""
    WAIT = "wait"
    """A receive, until its message is there."""
    COMMUNICATION = "communication"
    """A send, or the average of gradients over replicas."""
    UPDATE = "update"
    """The optimizer's writes."""


@dataclass(frozen=True, slots=True)
class Span:
    """A span of one rank's time.

    Attributes:
        rank: The rank.
        kind: What the rank did.
        action: The action of the schedule.
        start_seconds: Begin of the span.
        end_seconds: End of the span.
    """

    rank: int
    kind: SpanKind
    action: Action
    start_seconds: float
    end_seconds: float

    @property
    def duration_seconds(self) -> float:
        """Length of the span."""
        return self.end_seconds - self.start_seconds


_SPAN_KINDS, _ACTION_KINDS = tuple(SpanKind), tuple(ActionKind)


class PackedSpans(Sequence[Span]):
    """Spans in columns, about 30 bytes each, where objects take 300.

    Ranks gather each other's spans, so that a rank holds many thousands from each.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self._ranks = array("i", (span.rank for span in spans))
        self._kinds = bytes(_SPAN_KINDS.index(span.kind) for span in spans)
        self._actions = bytes(_ACTION_KINDS.index(span.action.kind) for span in spans)
        self._stages = array("i", (span.action.stage_index for span in spans))
        self._microbatches = array("q", (span.action.microbatch_index for span in spans))
        self._starts = array("d", (span.start_seconds for span in spans))
        self._ends = array("d", (span.end_seconds for span in spans))

    @override
    def __len__(self) -> int:
        return len(self._ranks)

    @override
    def __getitem__(self, index: int) -> Span:  # type: ignore[override]  # no slices
        kind = _ACTION_KINDS[self._actions[index]]
        action = Action(self._stages[index], kind, self._microbatches[index])
        span_kind = _SPAN_KINDS[self._kinds[index]]
        return Span(self._ranks[index], span_kind, action, self._starts[index], self._ends[index])


@dataclass(frozen=True)
class Timeline:
    """The spans of all ranks.

    Attributes:
        num_ranks: Number of ranks, those without spans included.
        spans: The spans, in any order.
    """

    num_ranks: int
    spans: tuple[Span, ...]

    @property
    def start_seconds(self) -> float:
        """When the first span begins."""
        return min((span.start_seconds for span in self.spans), default=0.0)

    @property
    def end_seconds(self) -> float:
        """When the last span ends."""
        return max((span.end_seconds for span in self.spans), default=0.0)

    @property
    def makespan_seconds(self) -> float:
        """Time from the first begin to the last end."""
        return self.end_seconds - self.start_seconds

    def busy_seconds(self, rank: int | None = None) -> float:
        """Sums the time that one rank, or all, spend computing and updating."""
        return sum(
            span.duration_seconds
            for span in self.spans
            if span.kind in (SpanKind.COMPUTE, SpanKind.UPDATE) and rank in (None, span.rank)
        )

    @property
    def bubble_fraction(self) -> float:
        """The share of the ranks' time in which they neither compute nor update."""
        total = self.num_ranks * self.makespan_seconds
        return (total - self.busy_seconds()) / total if total else 0.0

    def shifted_to_zero(self) -> Timeline:
        """Returns the same timeline with its first span at zero."""
        start = self.start_seconds
        shifted = (
            replace(s, start_seconds=s.start_seconds - start, end_seconds=s.end_seconds - start)
            for s in self.spans
        )
        return replace(self, spans=tuple(shifted))

    def between(self, start_seconds: float, end_seconds: float) -> Timeline:
        """Returns the part of the timeline between two times."""
        clipped = (
            replace(
                span,
                start_seconds=max(span.start_seconds, start_seconds),
                end_seconds=min(span.end_seconds, end_seconds),
            )
            for span in self.spans
        )
        return replace(self, spans=tuple(s for s in clipped if s.duration_seconds > 0))
