"""Write timelines as Chrome-trace JSON, which Perfetto (https://ui.perfetto.dev) opens."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

from lightning_dist.engine.profiling.record import Phase
from lightning_dist.engine.schedules.actions import Action
from lightning_dist.engine.schedules.timeline import Span, SpanKind, Timeline

_LOOP = "loop"


def write_chrome_trace(
    timeline: Timeline, path: str | os.PathLike[str], phases: Iterable[Phase] = ()
) -> None:
    """Writes a timeline.

    Args:
        timeline: A measured or simulated timeline.
        path: The JSON file.
        phases: Phases of the loops meanwhile, on the same clock.
    """
    loop = [*phases]
    # Perfetto drops what is before zero.
    starts = [phase.start_seconds for phase in loop] + [s.start_seconds for s in timeline.spans]
    zero = min(starts, default=0.0)
    names = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(timeline.num_ranks)
    ]
    events = [_event(span, zero) for span in timeline.spans]
    events += [_event(phase, zero) for phase in loop]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": [*names, *events], "displayTimeUnit": "ms"}, file)


def _event(part: Span | Phase, zero_seconds: float) -> dict[str, Any]:
    times = {
        "ph": "X",
        "pid": part.rank,
        "ts": (part.start_seconds - zero_seconds) * 1e6,
        "dur": part.duration_seconds * 1e6,
    }
    if isinstance(part, Phase):
        return {"name": part.kind.value, "cat": _LOOP, "tid": _LOOP, **times}
    action, waits = part.action, part.kind in (SpanKind.WAIT, SpanKind.COMMUNICATION)
    return {
        "name": str(action),
        "cat": part.kind.value,
        "tid": "communication" if waits else "compute",
        **times,
        "args": {
            "stage": action.stage_index,
            "microbatch": action.microbatch_index,
            "kind": action.kind.name.lower(),
        },
    }


def read_chrome_trace(path: str | os.PathLike[str]) -> Timeline:
    """Reads the timeline that :func:`write_chrome_trace` wrote."""
    with open(path, encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    spans = tuple(
        Span(
            rank=event["pid"],
            kind=SpanKind(event["cat"]),
            action=Action.parse(event["name"]),
            start_seconds=event["ts"] / 1e6,
            end_seconds=(event["ts"] + event["dur"]) / 1e6,
        )
        for event in events
        if event["ph"] == "X" and event["cat"] != _LOOP
    )
    return Timeline(sum(event["ph"] == "M" for event in events), spans)
