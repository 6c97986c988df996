"""The bubble of a pipeline: as measured, and as simulated with the measured costs.

A synchronous pipeline is measured step by step, from the first forward of any rank to the last
update. The time between steps is the loop's and no bubble. An asynchronous pipeline has no such
ends, so it is measured while it is full: in each stretch between drains and validations.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from lightning_dist.engine.profiling.record import RankRecord
from lightning_dist.engine.schedules.actions import ActionKind
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.schedules.schedule import lower
from lightning_dist.engine.schedules.simulator import StageCosts, simulate
from lightning_dist.engine.schedules.timeline import Span, SpanKind, Timeline

_BUSY = (SpanKind.COMPUTE, SpanKind.UPDATE)
_FILLS = 3
"""Length of an asynchronous simulation, without fill and drain, in pipeline depths."""


def measured_bubble(records: Sequence[RankRecord], shape: PipelineShape) -> float:
    """Returns the share of the ranks' time, on one clock, without compute or update."""
    if shape.family.update_rule.is_asynchronous:
        parts = [steady(stretch) for stretch in _stretches(records)]
    else:
        parts = [step_timeline(records, step) for step in range(len(records[0].steps))]
    total = sum(part.num_ranks * part.makespan_seconds for part in parts)
    return 1.0 - sum(part.busy_seconds() for part in parts) / total if total else 0.0


def _stretches(records: Sequence[RankRecord]) -> list[Timeline]:
    """Returns the timelines of stretches that no drain or validation interrupts."""
    found: dict[int, list[Span]] = {}
    for record in records:
        numbers = record.stretches or (0,) * len(record.spans)
        for number, span in zip(numbers, record.spans, strict=True):
            found.setdefault(number, []).append(span)
    return [Timeline(len(records), tuple(spans)) for spans in found.values()]


def step_timeline(records: Sequence[RankRecord], step: int) -> Timeline:
    """Returns the timeline of one timed step, between its begin and end on each rank."""
    found: list[Span] = []
    for record in records:
        start, end = record.steps[step]
        found += [s for s in record.spans if start <= s.start_seconds and s.end_seconds <= end]
    return Timeline(len(records), tuple(s for s in found if s.kind in _BUSY))


def steady(timeline: Timeline) -> Timeline:
    """Returns the timeline of an asynchronous pipeline without its fill and drain.

    The pipeline is full from when each rank has begun its first backward until one rank has done
    its last forward. If it never is, the timeline is empty.
    """
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for span in timeline.spans:
        if span.kind is not SpanKind.COMPUTE:
            continue
        if span.action.kind is ActionKind.FORWARD:
            ends[span.rank] = max(ends.get(span.rank, span.end_seconds), span.end_seconds)
        else:
            begins[span.rank] = min(begins.get(span.rank, span.start_seconds), span.start_seconds)
    if not len(begins) == len(ends) == timeline.num_ranks:
        return Timeline(timeline.num_ranks, ())
    return timeline.between(max(begins.values()), min(ends.values()))


def measured_costs(spans: Sequence[Span], num_stages: int) -> StageCosts | None:
    """Returns the costs of stages: medians over micro-batches, and over replicas.

    There are none (None) if some stage has not run forward and backward.
    """
    forward = _medians(spans, ActionKind.FORWARD)
    whole = _medians(spans, ActionKind.BACKWARD)
    inputs = _medians(spans, ActionKind.BACKWARD_INPUT)
    weights = _medians(spans, ActionKind.BACKWARD_WEIGHT)
    split = {s: inputs.get(s, 0.0) + weights[s] for s in weights}
    backward = {**whole, **split}
    stages = range(num_stages)
    if any(s not in forward or s not in backward for s in stages):
        return None
    updates = [s.duration_seconds for s in spans if s.kind is SpanKind.UPDATE]
    return StageCosts(
        tuple(forward[s] for s in stages),
        tuple(backward[s] for s in stages),
        update_seconds=median(updates) if updates else 0.0,
        input_share=sum(inputs.values()) / sum(split.values()) if split else 0.5,
    )


def predicted_timeline(shape: PipelineShape, costs: StageCosts) -> Timeline:
    """Simulates the schedule with measured costs, and transfers that take no time.

    It is of one batch; for an asynchronous pipeline of some batches between fill and drain.
    """
    if not shape.family.update_rule.is_asynchronous:
        return simulate(lower(shape.build(1)), costs)
    # A depth of two batches at least, for the update of a batch takes time once.
    depth = max(2, -(-shape.num_stages // shape.num_microbatches))
    schedule = lower(shape.build((_FILLS + 2) * depth))
    return steady(simulate(schedule, costs)).shifted_to_zero()


def _medians(spans: Sequence[Span], kind: ActionKind) -> dict[int, float]:
    by_stage: dict[int, list[float]] = {}
    for span in spans:
        if span.kind is SpanKind.COMPUTE and span.action.kind is kind:
            by_stage.setdefault(span.action.stage_index, []).append(span.duration_seconds)
    return {stage: median(seconds) for stage, seconds in by_stage.items()}
