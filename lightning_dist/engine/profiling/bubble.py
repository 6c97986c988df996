"""The bubble of a pipeline: as it was, and as the simulator says it must be with these costs.

A synchronous pipeline is looked at step by step, from the first forward of any rank to the last
update, for what lies between steps is the loop's and no bubble. An asynchronous one has no such
ends: there it is the whole window.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from lightning_dist.engine.profiling.record import RankRecord
from lightning_dist.engine.schedules.actions import ActionKind
from lightning_dist.engine.schedules.lowering import lower
from lightning_dist.engine.schedules.registry import PipelineShape, find_schedules
from lightning_dist.engine.schedules.schedule import UpdateRule
from lightning_dist.engine.schedules.simulator import StageCosts, simulate
from lightning_dist.engine.schedules.timeline import Span, SpanKind, Timeline

_BUSY = (SpanKind.COMPUTE, SpanKind.UPDATE)
_FILLS = 3
"""Times the pipeline's depth that an asynchronous one is simulated, beside filling and draining."""


def measured_bubble(records: Sequence[RankRecord], shape: PipelineShape) -> float:
    """Tells what share of the ranks' time they neither computed nor updated.

    Args:
        records: Of all ranks, on one clock.
        shape: Of the pipeline.
    """
    spans = [span for record in records for span in record.spans]
    if find_schedules(shape.schedule).update_rule is not UpdateRule.FLUSHED:
        return steady(Timeline(len(records), tuple(spans))).bubble_fraction
    rounds = [step_timeline(records, step) for step in range(len(records[0].steps))]
    total = sum(r.num_ranks * r.makespan_seconds for r in rounds)
    return 1.0 - sum(r.busy_seconds() for r in rounds) / total if total else 0.0


def step_timeline(records: Sequence[RankRecord], step: int) -> Timeline:
    """Cuts one step out, by when each rank began and ended it.

    Args:
        records: Of all ranks, on one clock.
        step: Its place among the timed ones.
    """
    found: list[Span] = []
    for record in records:
        start, end = record.steps[step]
        found += [s for s in record.spans if start <= s.start_seconds and s.end_seconds <= end]
    return Timeline(len(records), tuple(s for s in found if s.kind in _BUSY))


def steady(timeline: Timeline) -> Timeline:
    """Leaves out where an asynchronous pipeline fills and drains.

    It is full when each rank has begun its first backward, and until one has done its last forward.

    Args:
        timeline: Of a pipeline that batches follow each other in.
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
    if not begins or not ends:
        return timeline
    return timeline.between(max(begins.values()), min(ends.values()))


def measured_costs(spans: Sequence[Span], num_stages: int) -> StageCosts | None:
    """Gives what stages cost: medians over micro-batches, and over replicas.

    Args:
        spans: Of all ranks.
        num_stages: Of the pipeline.

    Returns:
        None if some stage has not run forward and backward.
    """
    forward = _medians(spans, ActionKind.FORWARD)
    whole = _medians(spans, ActionKind.BACKWARD)
    inputs = _medians(spans, ActionKind.BACKWARD_INPUT)
    weights = _medians(spans, ActionKind.BACKWARD_WEIGHT)
    parted = {s: inputs.get(s, 0.0) + weights[s] for s in weights}
    backward = {**whole, **parted}
    stages = range(num_stages)
    if any(s not in forward or s not in backward for s in stages):
        return None
    updates = [s.duration_seconds for s in spans if s.kind is SpanKind.UPDATE]
    return StageCosts(
        tuple(forward[s] for s in stages),
        tuple(backward[s] for s in stages),
        update_seconds=median(updates) if updates else 0.0,
        input_share=sum(inputs.values()) / sum(parted.values()) if parted else 0.5,
    )


def predicted_timeline(shape: PipelineShape, costs: StageCosts) -> Timeline:
    """Plays the schedule with measured costs, and messages that cost nothing.

    Args:
        shape: Of the pipeline.
        costs: Of its stages.

    Returns:
        One batch; or some batches of an asynchronous pipeline between filling and draining.
    """
    schedules, homes = find_schedules(shape.schedule), shape.rank_of_stage
    if schedules.update_rule is UpdateRule.FLUSHED:
        return simulate(lower(schedules.build(homes, shape.num_microbatches)), costs)
    num_batches = (_FILLS + 2) * shape.num_stages
    schedule = lower(schedules.build(homes, shape.num_microbatches, num_batches))
    return steady(simulate(schedule, costs)).shifted_to_zero()


def _medians(spans: Sequence[Span], kind: ActionKind) -> dict[int, float]:
    by_stage: dict[int, list[float]] = {}
    for span in spans:
        if span.kind is SpanKind.COMPUTE and span.action.kind is kind:
            by_stage.setdefault(span.action.stage_index, []).append(span.duration_seconds)
    return {stage: median(seconds) for stage, seconds in by_stage.items()}
