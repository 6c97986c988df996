"""News of a failure goes round while the main threads are busy, and all threads end after it."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_dist.strategies.failure_ring import Failure, FailureRing
from tests.helpers.workers import WorkerPool

PATIENCE_SECONDS = 20.0


def watchers(before: set[threading.Thread]) -> int:
    names = [thread.name for thread in threading.enumerate() if thread not in before]
    return sum(name.startswith(("failure-ring", "receive-from-", "send-to-")) for name in names)


def fail_on(failing: int) -> tuple[list[str], int]:
    """Lets one rank fail; nobody closes the ring before all have told of its threads."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    learned: list[str] = []
    before = set(threading.enumerate())  # of cases that this process has run
    group = dist.new_group(timeout=timedelta(days=1))
    ring = FailureRing(group, rank, world_size, lambda failure: learned.append(str(failure)))
    assert watchers(before) == 3
    dist.barrier()
    if rank == failing:
        ring.announce(Failure(rank, "a mistake"))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while watchers(before) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = watchers(before)
    dist.barrier()
    ring.close()
    dist.destroy_process_group()
    return learned, left


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_ends_the_watch_though_no_rank_closes_it(
    workers: WorkerPool, world_size: int, failing: int
) -> None:
    results = workers.run(world_size, fail_on, failing)
    told = [f"Rank {failing} failed first: a mistake"]
    assert [learned for learned, _ in results] == [
        [] if rank == failing else told for rank in range(world_size)
    ]
    assert [left for _, left in results] == [0] * world_size
