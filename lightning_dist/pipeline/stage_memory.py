"""What the layers of a stage take, so that a better cut is one that fits.

Of a rank's memory some is there whatever the schedule does: parameters, gradients, optimizer state.
The rest grows with the micro-batches in flight: what forwards keep for their backwards, and under
``pipedream`` a version of the weights for each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lightning_dist.pipeline.actions import ActionKind
from lightning_dist.pipeline.layer_costs import LayerCosts
from lightning_dist.pipeline.partition import MemoryLimit
from lightning_dist.pipeline.schedule import Schedule, UpdateRule
from lightning_dist.pipeline.schedules import find_schedules
from lightning_dist.pipeline.shape import PipelineShape

_ENDS = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)


def memory_limit(
    layers: Sequence[LayerCosts], shape: PipelineShape, weight_versions: str, cap_bytes: float
) -> MemoryLimit:
    """Says what stages of some layers hold, and may.

    Args:
        layers: In their order.
        shape: Of the pipeline.
        weight_versions: As for :class:`~lightning_dist.PipelineStrategy`.
        cap_bytes: Of each rank; stages that share one get an equal part each.
    """
    rule = find_schedules(shape.schedule).update_rule
    versions, per_flight = 1, 0  # of the weights at all times, and for each micro-batch in flight
    if rule is UpdateRule.LATE:
        versions = 2
    elif rule is UpdateRule.EACH and weight_versions == "vertical_sync":
        versions = shape.num_ranks
    elif rule is UpdateRule.EACH and weight_versions == "stash":
        versions, per_flight = 0, 1  # the present one is that of a micro-batch in flight
    return MemoryLimit(
        cap_bytes / shape.stages_per_rank,
        [layer.resident_bytes + (versions - 1) * layer.parameter_bytes for layer in layers],
        [layer.activation_bytes + per_flight * layer.parameter_bytes for layer in layers],
        _in_flight(shape),
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
