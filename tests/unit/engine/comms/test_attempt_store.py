"""Attempts of a launcher that share a store, each with a name of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_dist.engine.comms import attempt_store
from lightning_dist.engine.comms.attempt_store import agree_on_attempt

PATIENCE = timedelta(seconds=10)


def attempt(store: dist.Store, ranks: Sequence[int], size: int, timeout: timedelta) -> list[str]:
    with ThreadPoolExecutor(size) as threads:
        runs = [threads.submit(agree_on_attempt, store, rank, size, timeout) for rank in ranks]
    return [run.result() for run in runs]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_attempt_has_a_name_of_its_own(size: int) -> None:
    store = dist.HashStore()
    names = [attempt(store, range(size), size, PATIENCE) for _ in range(5)]
    assert all(len(set(of_attempt)) == 1 for of_attempt in names)
    assert len({of_attempt[0] for of_attempt in names}) == 5


def test_the_world_may_have_another_size_in_each_attempt() -> None:
    store = dist.HashStore()
    for size in (3, 2, 4):
        assert len(set(attempt(store, range(size), size, PATIENCE))) == 1


def test_ranks_that_have_asked_and_died_do_not_confuse_the_next_attempt() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.05))
    for rank in (1, 2):
        with pytest.raises(RuntimeError):  # as if its process had ended
            agree_on_attempt(store, rank, 3, PATIENCE)
    store.set_timeout(PATIENCE)
    # The slowest rank is the first, then the last.
    for order in ([1, 2, 0], [0, 1, 2]):
        assert len(set(attempt(store, order, 3, PATIENCE))) == 1


def test_a_first_rank_that_has_died_does_not_confuse_the_next_attempt() -> None:
    store = dist.HashStore()
    assert len(set(attempt(store, range(3), 3, PATIENCE))) == 1
    with pytest.raises(TimeoutError, match=r"The ranks \[1, 2\] have not met rank 0 within 0.05 s"):
        agree_on_attempt(store, 0, 3, timedelta(seconds=0.05))
    assert len(set(attempt(store, range(3), 3, PATIENCE))) == 1


def test_a_launcher_that_is_lost_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_store, "_CONNECT_SECONDS", 0.05)
    begin = time.monotonic()
    with pytest.raises(ConnectionError, match="127.0.0.1:1 does not answer: its process was lost"):
        attempt_store.connect("127.0.0.1", 1, 0, 1, timedelta(minutes=30))
    assert time.monotonic() < begin + 30


def test_the_stores_own_timeout_is_the_runs() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for timeout in (timedelta(seconds=5), timedelta(minutes=30)):
        store = attempt_store.connect("127.0.0.1", server.port, 0, 1, timeout)
        assert store.timeout == timeout
