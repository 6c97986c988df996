"""Clocks that are wrong by known amounts."""

from __future__ import annotations

import time

import torch.distributed as dist

from lightning_dist.engine.profiling.meters.clock_sync import exchange_pings
from lightning_dist.engine.profiling.record import ClockOffset
from tests.helpers.processes.workers import WorkerPool

AHEAD = (100.0, -5.0)


def exchange() -> tuple[ClockOffset, ...]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    offsets = exchange_pings(lambda: time.time() + AHEAD[rank], dist.group.WORLD)
    dist.destroy_process_group()
    return offsets


def test_all_ranks_learn_how_far_all_clocks_are_apart(workers: WorkerPool) -> None:
    first, second = workers.run(2, exchange)
    assert first == second
    own, other = first
    assert own == ClockOffset(0.0, 0.0)
    error = other.seconds - (AHEAD[1] - AHEAD[0])
    assert 0 < other.uncertainty_seconds < 0.5
    assert abs(error) <= other.uncertainty_seconds + 1e-6
