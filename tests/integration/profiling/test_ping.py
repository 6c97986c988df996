"""Clocks that are wrong by known amounts."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from lightning_dist.profiling.clock_offset import ClockOffset
from lightning_dist.profiling.ping import exchange_pings
from tests.helpers.workers import WorkerPool

AHEAD = (100.0, -5.0, 0.25)


def exchange() -> tuple[ClockOffset, ...]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    offsets = exchange_pings(lambda: time.time() + AHEAD[rank], dist.group.WORLD)
    dist.destroy_process_group()
    return offsets


def test_all_ranks_learn_how_far_all_clocks_are_apart(workers: WorkerPool) -> None:
    first, *others = workers.run(3, exchange)
    assert all(other == first for other in others)
    assert first[0] == ClockOffset(0.0, 0.0)
    for rank in (1, 2):
        error = first[rank].seconds - (AHEAD[rank] - AHEAD[0])
        assert 0 < first[rank].uncertainty_seconds < 0.5
        assert abs(error) <= first[rank].uncertainty_seconds + 1e-6
        assert error == pytest.approx(0.0, abs=0.1)
