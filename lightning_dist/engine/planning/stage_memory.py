"""What the layers of a stage take, so that a better cut is one that fits.

Of a rank's memory some is there whatever the schedule does: parameters, gradients, optimizer state.
The rest depends on it: what forwards keep for their backwards, for each micro-batch in flight, and
older versions of the weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lightning_dist.engine.planning.layer_costs import LayerCosts
from lightning_dist.engine.planning.partition import MemoryLimit
from lightning_dist.engine.schedules.actions import ActionKind
from lightning_dist.engine.schedules.schedule import Schedule, UpdateRule
from lightning_dist.engine.schedules.schedules import find_schedules
from lightning_dist.engine.schedules.shape import PipelineShape

_ENDS = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)


def memory_limit(
    layers: Sequence[LayerCosts],
    shape: PipelineShape,
    num_copies: Sequence[int],
    cap_bytes: float,
) -> MemoryLimit:
    """Says what stages of some layers hold, and may.

    Args:
        layers: In their order.
        shape: Of the pipeline.
        num_copies: Of its weights on each stage; see
            :func:`.num_copies`.
        cap_bytes: Of each rank; stages that share one get an equal part each.
    """
    return MemoryLimit(
        cap_bytes / shape.stages_per_rank,
        [layer.resident_bytes for layer in layers],
        [layer.activation_bytes for layer in layers],
        _in_flight(shape),
        [layer.version_bytes for layer in layers],
        num_copies,
    )


def _in_flight(shape: PipelineShape) -> list[int]:
    schedules, count = find_schedules(shape.schedule), shape.num_microbatches
    overlap = schedules.update_rule is not UpdateRule.FLUSHED
    num_batches = 1 + 2 * shape.num_stages // count if overlap else 1
    schedule: Schedule = schedules.build(shape.rank_of_stage, count, num_batches)
    peaks = [0] * shape.num_stages
    for actions in schedule.ranks:
        present: Counter[int] = Counter()
        for action in actions:
            stage = action.stage_index
            present[stage] += (action.kind is ActionKind.FORWARD) - (action.kind in _ENDS)
            peaks[stage] = max(peaks[stage], present[stage])
    return peaks
