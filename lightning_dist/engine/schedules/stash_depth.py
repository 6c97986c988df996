"""The number of versions of its weights that a stage holds besides the present one.

The number is counted by playing the schedule as the runtime executes it: a forward records its
version, and an update adds a version.

==========================================  ======================================================
weights                                     copies on stage s of n
==========================================  ======================================================
synchronous schedules                       0
``pipedream``                               n - 1 - s
``pipedream``, ``"vertical_sync"``          n - 1
``pipedream``, ``"none"``                   0
``pipedream``, staleness corrected by       n - s, one for each micro-batch in flight; 0 on the
``"predict"``                               last
``pipedream_2bw``                           1, 0 on the last
``pipedream_2bw``, staleness corrected by   2, one for each batch in flight; 1 on the last
``"predict"``
==========================================  ======================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.schedules.schedule import lower
from lightning_dist.engine.schedules.update_rule import BackwardWeights, WeightVersions


def num_copies(
    shape: PipelineShape, weight_versions: WeightVersions, *, predicts: bool = False
) -> tuple[int, ...]:
    """Counts the most copies of its weights that each stage holds at a time.

    A measurement of how far weights have moved keeps a batch's weights until its update. Such
    copies are not counted.
    """
    homes, rule = shape.rank_of_stage, shape.family.update_rule
    num_ranks, size = shape.num_ranks, shape.num_microbatches
    used = [rule.weights(weight_versions, rank, num_ranks, size) for rank in homes]
    if any(weights.of_backward is not BackwardWeights.STASHED for weights in used):
        return (0,) * shape.num_stages
    num_batches = rule.lag(num_ranks, size) + rule.steady_batches(shape.num_stages, size)
    schedule = lower(shape.build(num_batches))

    def of_stage(stage: int) -> int:
        actions = [a for a in schedule.ranks[homes[stage]] if a.stage_index == stage]
        if predicts:
            return _most_predicted(actions, schedule.microbatches_per_update)
        return _most_stashed(actions, used[stage].age)

    return tuple(map(of_stage, range(shape.num_stages)))


def _most_stashed(actions: Sequence[Action], age: int) -> int:
    """Counts versions that forwards share, which stay at most ``age`` updates behind."""
    present = most = 0
    used: dict[int, int] = {}
    num_users: Counter[int] = Counter()
    for action in actions:
        oldest = max(0, present - age)  # that a later forward can want
        if action.kind is ActionKind.FORWARD:
            used[action.microbatch_index] = oldest
            num_users[oldest] += 1
        elif action.kind is ActionKind.BACKWARD:
            version = used.pop(action.microbatch_index)
            num_users[version] -= 1
            if not num_users[version]:
                del num_users[version]
        elif action.kind is ActionKind.STEP:
            present += 1
            oldest = max(0, present - age)
        # No version in use is newer than the oldest that is wanted later.
        most = max(most, len(num_users) + present - oldest - (oldest in num_users))
    return most


def _most_predicted(actions: Sequence[Action], size: int) -> int:
    """Counts the copies of batches; a batch needs one unless the next update is its own."""
    num_updates = most = 0
    copied: set[int] = set()
    for action in actions:
        batch, place = divmod(action.microbatch_index, size)
        if action.kind is ActionKind.FORWARD and place == 0 and batch > num_updates:
            copied.add(batch)
        elif action.kind is ActionKind.BACKWARD and place == size - 1:
            copied.discard(batch)
        elif action.kind is ActionKind.STEP:
            num_updates += 1
        most = max(most, len(copied))
    return most
