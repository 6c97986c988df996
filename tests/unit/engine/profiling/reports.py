"""Records of ranks that nobody has run."""

from __future__ import annotations

from dataclasses import replace

from lightning_dist.engine.planning.layer_costs import LayerCosts
from lightning_dist.engine.planning.memory import RankMemory
from lightning_dist.engine.planning.traffic import MessageKind, Traffic
from lightning_dist.engine.profiling.record import (
    ClockOffset,
    MemoryUse,
    Phase,
    PhaseKind,
    RankPlace,
    RankRecord,
    StepCount,
)
from lightning_dist.engine.profiling.report import ProfileReport
from lightning_dist.engine.schedules.registry import PipelineShape, find_family
from lightning_dist.engine.schedules.schedule import lower
from lightning_dist.engine.schedules.simulator import StageCosts, simulate
from lightning_dist.engine.schedules.timeline import Span

COSTS = StageCosts((0.010, 0.020), (0.020, 0.040), update_seconds=0.005)
LOADING_SECONDS, STEP_SECONDS = 0.007, 0.400
AHEAD = (0.0, 3.0)
"""By how much the ranks' clocks are."""


def shape_of(schedule: str, rank: int) -> PipelineShape:
    return PipelineShape(schedule, 4, (2, 1), rank)


def played(schedule: str) -> tuple[Span, ...]:
    shape = shape_of(schedule, 0)
    order = find_family(schedule).build(shape.rank_of_stage, shape.num_microbatches)
    return simulate(lower(order), COSTS).spans


def record_of(rank: int, schedule: str, num_steps: int = 3) -> RankRecord:
    """What a rank would measure of steps that follow the simulator, by a clock that is wrong."""
    spans, phases, steps = [], [], []
    for step in range(num_steps):
        begin = step * STEP_SECONDS + AHEAD[rank]
        steps.append((begin, begin + STEP_SECONDS))
        phases.append(Phase(rank, PhaseKind.DATA_LOADING, begin, begin + LOADING_SECONDS))
        for span in played(schedule):
            if span.rank == rank:
                start = begin + LOADING_SECONDS + span.start_seconds
                end = begin + LOADING_SECONDS + span.end_seconds
                spans.append(replace(span, start_seconds=start, end_seconds=end))
    memory = RankMemory(1_000_000, 2_000_000, 2_000_000, 700_000 * (2 - rank))
    return RankRecord(
        RankPlace(rank, f"host{rank}", stage_group=rank, shape=shape_of(schedule, rank)),
        tuple(steps),
        tuple(spans),
        tuple(phases),
        num_samples=8 * num_steps,
        num_tokens=80 * num_steps,
        count=StepCount(1000 * (rank + 1), (Traffic(MessageKind.SEND, ("pp",), 4, 640),)),
        memory=MemoryUse(memory, replace(memory, activations=900_000)),
        layers={
            index: LayerCosts(f"layer {index}", 0.005 * (index + 1), 0.01, 64, 128, 300_000)
            for index in ((0, 1) if rank == 0 else (2,))
        },
    )


def report_of(schedule: str = "1f1b") -> ProfileReport:
    offsets = [ClockOffset(seconds, 1e-4) for seconds in AHEAD]
    return ProfileReport.join([record_of(rank, schedule) for rank in (0, 1)], offsets, 7)
