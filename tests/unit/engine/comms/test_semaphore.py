"""A semaphore in memory that processes share."""

from __future__ import annotations

import mmap
import threading
import time

import pytest

from lightning_dist.engine.comms.shared_ring import SEMAPHORE_BYTES, Semaphore


@pytest.fixture
def memory() -> mmap.mmap:
    return mmap.mmap(-1, 2 * SEMAPHORE_BYTES)


def semaphore(memory: mmap.mmap, count: int = 0) -> Semaphore:
    made = Semaphore(memory, SEMAPHORE_BYTES)
    made.begin(count)
    return made


def test_what_is_posted_can_be_taken_once(memory: mmap.mmap) -> None:
    made, other = semaphore(memory, 1), Semaphore(memory, SEMAPHORE_BYTES)
    made.post()
    assert [other.try_wait() for _ in range(3)] == [True, True, False]
    assert memory[:SEMAPHORE_BYTES] == bytes(SEMAPHORE_BYTES), "the place before is not its own"


def test_waiting_ends_in_time(memory: mmap.mmap) -> None:
    made = semaphore(memory)
    began = time.monotonic()
    assert not made.wait(0.05)
    assert time.monotonic() - began >= 0.05
    made.post()
    assert made.wait(0.0)


@pytest.mark.parametrize("timeout", [10.0, None])
def test_who_waits_is_woken(memory: mmap.mmap, timeout: float | None) -> None:
    made, found = semaphore(memory), list[bool]()
    waiting = threading.Thread(target=lambda: found.append(made.wait(timeout)))
    waiting.start()
    assert not found
    made.post()
    waiting.join(10.0)
    assert found == [True]
