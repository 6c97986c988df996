"""When a pipeline of balanced stages would have made each update, by the package's simulator.

The unit is the time that one device takes for a batch, a third of it for the forward. Messages and
updates take no time. Without stashing the backward runs the layers again, as the runtime does then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_dist.engine.schedules.registry import find_schedules
from lightning_dist.engine.schedules.simulator import StageCosts, simulate
from recipes.staleness.trial import METHODS, Method

_FORWARD_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class Clocked:
    """A way to train, and the schedule that determines its time.

    Attributes:
        name: Name in table and picture.
        method: The method, which determines the weights.
        schedule: The schedule; several schedules compute a synchronous method alike.
    """

    name: str
    method: Method
    schedule: str


CLOCKED = tuple(
    clocked
    for method in METHODS
    for clocked in (
        (Clocked("sync, 1f1b", method, "1f1b"), Clocked("sync, zbv", method, "zbv"))
        if method.trained_stages == 1
        else (Clocked(method.name, method, method.schedule),)
    )
)


def update_times(clocked: Clocked, num_ranks: int, num_updates: int) -> list[float]:
    """Returns the times at which the gradients of each update were complete on all stages.

    Args:
        clocked: The method and its schedule.
        num_ranks: Number of ranks of the pipeline.
        num_updates: Number of updates.

    Returns:
        One time for each update, in batches of one device.
    """
    family = find_schedules(clocked.schedule)
    count = family.default_microbatches(num_ranks)
    homes = family.rank_of_stage(num_ranks)
    costs = _costs(clocked.method, len(homes), count)
    if not family.update_rule.is_asynchronous:
        each = simulate(family.build(homes, count), costs).makespan_seconds
        return [each * (update + 1) for update in range(num_updates)]
    ends: dict[int, float] = {}
    for span in simulate(family.build(homes, count, num_updates), costs).spans:
        if span.action.kind.is_compute:
            update = span.action.microbatch_index // count
            ends[update] = max(ends.get(update, 0.0), span.end_seconds)
    return [ends[update] for update in range(num_updates)]


def _costs(method: Method, num_stages: int, num_microbatches: int) -> StageCosts:
    share = 1.0 / (num_stages * num_microbatches)
    forward = share * _FORWARD_SHARE
    backward = share - forward
    again = forward if method.weight_versions == "none" else 0.0
    backwards = [backward + again] * (num_stages - 1) + [backward]
    return StageCosts((forward,) * num_stages, tuple(backwards))


def share_of_one_device(times: Mapping[str, list[float]]) -> dict[str, float]:
    """Compares whole trainings with one device.

    Args:
        times: Times of each update, by name.
    """
    return {name: found[-1] / len(found) for name, found in times.items()}
