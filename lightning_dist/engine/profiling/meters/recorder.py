"""The recorder of a rank's spans: the measured side of the timeline.

Each action costs one clock reading and one tuple, since it begins where the one before has ended.
Everything else is computed when spans are read. On a GPU the clock is a CUDA event. So a span is
the time on the device, not the time of the launch, and no action waits for the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lightning_dist.engine.schedules.actions import Action
from lightning_dist.engine.schedules.timeline import Span, SpanKind

_COUNTED_FROM_SECONDS = 8.0  # single precision resolves this to half a microsecond
_Marks = tuple[int, SpanKind, Action, Any, Any]


class _HostClock:
    """The monotonic clock of the host, shifted to the epoch so that hosts can be compared."""

    def __init__(self) -> None:
        self._offset_seconds = time.time() - time.perf_counter()

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        return mark + self._offset_seconds


@dataclass(slots=True)
class _CudaMark:
    """An event, and an earlier mark from which its time is counted; the first has none."""

    event: torch.cuda.Event
    since: _CudaMark | None
    known_seconds: float | None = None  # since the epoch, once they were computed

    def seconds(self) -> float:
        """Returns the event's seconds since the epoch; waits for the event."""
        if self.known_seconds is None:
            assert self.since is not None
            before = self.since.seconds()
            self.event.synchronize()
            self.known_seconds = before + self.since.event.elapsed_time(self.event) / 1e3
            self.since = None  # which may be the last reference to the earlier mark
        return self.known_seconds


class CudaClock:
    """Events on the current CUDA stream.

    CUDA returns the time between two events in single precision, which after an hour resolves a
    quarter of a millisecond. So a mark is counted from another mark some seconds earlier.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        event = self._record()
        torch.cuda.synchronize(device)
        self._since = _CudaMark(event, None, time.time())
        self._renewal = time.monotonic() + _COUNTED_FROM_SECONDS

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def mark(self) -> _CudaMark:
        """Records an event."""
        mark = _CudaMark(self._record(), self._since)
        if time.monotonic() >= self._renewal:
            self._since.seconds()  # the device has passed it long ago
            self._since = mark
            self._renewal = time.monotonic() + _COUNTED_FROM_SECONDS
        return mark

    def seconds(self, mark: _CudaMark) -> float:
        """Turns a mark into seconds since the epoch; waits for its event."""
        return mark.seconds()


class Recorder:
    """Keeps the newest spans of one rank, by a clock of its device.

    Older spans than ``capacity`` are forgotten, so that long runs need no more memory. All spans
    between :meth:`keep` and :meth:`take` are kept.
    """

    def __init__(self, rank: int, device: torch.device, capacity: int = 20_000) -> None:
        self.rank = rank
        self._clock: CudaClock | _HostClock = (
            CudaClock(device) if device.type == "cuda" else _HostClock()
        )
        self._marks: deque[_Marks] = deque(maxlen=capacity)
        self._kept: list[_Marks] | None = None
        self._stretch = 0

    @contextmanager
    def span(self, kind: SpanKind, action: Action) -> Iterator[None]:
        """Returns a context manager that records an action, if it ends well."""
        start = self.mark()
        yield
        self.record(kind, action, start)

    def mark(self) -> Any:
        """Reads the clock, for :meth:`record`."""
        return self._clock.mark()

    def record(self, kind: SpanKind, action: Action, start: Any) -> Any:
        """Records a span that began at a mark from :meth:`mark` and ends now; returns its end."""
        end = self.mark()
        marks = (self._stretch, kind, action, start, end)
        self._marks.append(marks)
        if self._kept is not None:
            self._kept.append(marks)
        return end

    def seconds(self, mark: Any) -> float:
        """Turns a mark from :meth:`mark` into seconds since the epoch."""
        return self._clock.seconds(mark)

    def interrupt(self) -> None:
        """Begins a new stretch of spans, after other work. Collective: every rank must call it."""
        self._stretch += 1

    def stretches(self) -> dict[int, tuple[Span, ...]]:
        """Returns the recorded spans in seconds since the epoch, oldest first, by stretch."""
        found: dict[int, list[Span]] = {}
        for stretch, *marks in self._marks:
            found.setdefault(stretch, []).append(self._span(*marks))
        return {stretch: tuple(spans) for stretch, spans in found.items()}

    def keep(self) -> None:
        """Begins to keep all spans for :meth:`take`, however many there are."""
        self._kept = []

    def take(self) -> tuple[tuple[int, Span], ...]:
        """Returns the spans since :meth:`keep`, as :meth:`stretches`, and forgets them.

        Each has the number of its stretch beside it.
        """
        kept, self._kept = self._kept or [], None
        return tuple((stretch, self._span(*marks)) for stretch, *marks in kept)

    def _span(self, kind: SpanKind, action: Action, start: Any, end: Any) -> Span:
        return Span(
            self.rank,
            kind,
            action,
            start_seconds=self.seconds(start),
            end_seconds=self.seconds(end),
        )

    def clear(self) -> None:
        """Forgets all spans."""
        self._marks.clear()
