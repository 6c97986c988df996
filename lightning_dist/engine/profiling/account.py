"""The uses of one rank's time, with each second counted once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from lightning_dist.engine.profiling.exposure import Interval, length, outside, union
from lightning_dist.engine.profiling.record import Phase, PhaseKind, RankRecord
from lightning_dist.engine.schedules.actions import ActionKind
from lightning_dist.engine.schedules.timeline import Span, SpanKind


class Use(StrEnum):
    """What time is used for; if two uses overlap, the first one here counts."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    WAITING = "waiting"
    """Waiting for another rank."""
    COMMUNICATION = "communication"
    """Communication that no computing hides."""
    DATA_LOADING = "data loading"
    CHECKPOINT = "checkpoint"
    OTHER = "other"
    """Lightning's loop, loggers, callbacks."""


_OF_KINDS: Mapping[str, Use] = MappingProxyType(
    {
        PhaseKind.DATA_LOADING: Use.DATA_LOADING,
        PhaseKind.CHECKPOINT: Use.CHECKPOINT,
        SpanKind.UPDATE: Use.UPDATE,
        SpanKind.WAIT: Use.WAITING,
        SpanKind.COMMUNICATION: Use.COMMUNICATION,
    }
)


def use_of(part: Span | Phase) -> Use | None:
    """Returns the use of a span or phase; None for validation, which is in no step."""
    if isinstance(part, Span) and part.kind is SpanKind.COMPUTE:
        return Use.FORWARD if part.action.kind is ActionKind.FORWARD else Use.BACKWARD
    return _OF_KINDS.get(part.kind)


class Account(NamedTuple):
    """The uses of one rank's time: seconds of a step without validation, and those of each use.

    The latter's sum is a whole step.
    """

    step_seconds: float
    seconds: Mapping[Use, float]

    @property
    def compute_seconds(self) -> float:
        """Time of forward, backward and update."""
        return sum(self.seconds[use] for use in (Use.FORWARD, Use.BACKWARD, Use.UPDATE))


def account_for(record: RankRecord) -> Account:
    """Creates the account of a rank.

    A part of the step that is timed as a whole, such as a DDP backward, contains collectives. Its
    share of communication is the exposed share of the same part in the traced step.
    """
    count = len(record.steps)
    validation = [
        (phase.start_seconds, phase.end_seconds)
        for phase in record.phases
        if phase.kind is PhaseKind.VALIDATION
    ]
    total = length(outside(record.steps, validation)) / count
    uses = _by_use([*record.spans, *record.phases], validation)
    found = {use: value / count for use, value in uses.items()}
    if record.exposure is not None and not found[Use.WAITING] + found[Use.COMMUNICATION]:
        for use in (Use.FORWARD, Use.BACKWARD, Use.UPDATE):
            part = record.exposure.shares.get(use.value, 0.0) * found[use]
            found[use] -= part
            found[Use.COMMUNICATION] += part
    found[Use.OTHER] = max(0.0, total - sum(found.values()))
    return Account(total, found)


def _by_use(parts: Iterable[Span | Phase], left_out: Sequence[Interval]) -> dict[Use, float]:
    intervals: dict[Use, list[Interval]] = {use: [] for use in Use}
    for part in parts:
        if (use := use_of(part)) is not None:
            intervals[use].append((part.start_seconds, part.end_seconds))
    seconds: dict[Use, float] = {}
    before = [*left_out]
    for use, own in intervals.items():
        seconds[use] = length(outside(own, before))
        before = union([*before, *own])
    return seconds
