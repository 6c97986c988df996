"""When each update would have been made, of a pipeline by the package's simulator.

The unit is the time that one device takes for a batch, a third of it for the forward. Stages are
balanced. Updates take no time, and messages that of a network, or none. Without stashing the
backward runs the layers again, as the runtime does then. Replicas average gradients during the
backward, and weights behind it. Each rank is a server of its part of the weights, so pushes and
pulls are as many bytes of a link as an all-reduce; a worker waits for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_dist.engine.schedules.registry import find_family
from lightning_dist.engine.schedules.simulator import StageCosts, simulate
from recipes.staleness.network import Network
from recipes.staleness.trial import METHODS, SYNC, Method

_FORWARD_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class Clocked:
    """A way to train, and the schedule that determines its time.

    Attributes:
        name: Name in table and picture.
        method: The method, which determines the weights.
        schedule: The schedule; several schedules compute a synchronous method alike. None for
            replicas.
    """

    name: str
    method: Method
    schedule: str | None


CLOCKED = tuple(
    clocked
    for method in METHODS
    for clocked in (
        (
            Clocked("sync, 1f1b", method, "1f1b"),
            Clocked("sync, zbv", method, "zbv"),
            Clocked("sync, replicas", method, None),
        )
        if method.trained_stages == 1
        else (Clocked(method.name, method, method.schedule if method.is_pipeline else None),)
    )
)


def update_times(
    clocked: Clocked, num_ranks: int, num_updates: int, network: Network | None = None
) -> list[float]:
    """Returns the times at which the gradients of each update were complete on all stages.

    Args:
        clocked: The method and its schedule.
        num_ranks: Number of ranks.
        num_updates: Number of updates.
        network: The links between ranks; None for messages that take no time.

    Returns:
        One time for each update, in batches of one device.
    """
    if clocked.schedule is None:
        average = 0.0 if network is None else network.average(num_ranks)
        return _times_of_replicas(clocked.method, num_ranks, num_updates, average)
    family = find_family(clocked.schedule)
    count = family.default_microbatches(num_ranks)
    homes = family.rank_of_stage(num_ranks)
    transfer = 0.0 if network is None else network.transfer(count)
    costs = _costs(clocked.method, len(homes), count, transfer)
    if not family.update_rule.is_asynchronous:
        each = simulate(family.build(homes, count), costs).makespan_seconds
        return [each * (update + 1) for update in range(num_updates)]
    ends: dict[int, float] = {}
    for span in simulate(family.build(homes, count, num_updates), costs).spans:
        if span.action.kind.is_compute:
            update = span.action.microbatch_index // count
            ends[update] = max(ends.get(update, 0.0), span.end_seconds)
    return [ends[update] for update in range(num_updates)]


def _times_of_replicas(
    method: Method, num_replicas: int, num_updates: int, average: float
) -> list[float]:
    step = 1.0 / num_replicas
    every = 1 if method.local is None else method.local.sync_every
    if method is SYNC:
        average = max(0.0, average - step * (1.0 - _FORWARD_SHARE))
    return [count * step + count // every * average for count in range(1, num_updates + 1)]


def _costs(method: Method, num_stages: int, num_microbatches: int, transfer: float) -> StageCosts:
    share = 1.0 / (num_stages * num_microbatches)
    forward = share * _FORWARD_SHARE
    backward = share - forward
    again = forward if method.weight_versions == "none" else 0.0
    backwards = [backward + again] * (num_stages - 1) + [backward]
    return StageCosts((forward,) * num_stages, tuple(backwards), transfer)


def share_of_one_device(times: Mapping[str, list[float]]) -> dict[str, float]:
    """Compares whole trainings with one device.

    Args:
        times: Times of each update, by name.
    """
    return {name: found[-1] / len(found) for name, found in times.items()}
