"""News of a failure goes round while the main threads are busy, and all threads end after it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_dist.engine.comms.failures.heartbeat import Rhythm
from lightning_dist.engine.comms.failures.peer_failure import Failure, FailureRing
from tests.helpers.processes.workers import WorkerPool

PATIENCE_SECONDS = 20.0
QUIET = Rhythm(interval_seconds=60, patience_seconds=1800, limit_seconds=1800)
QUICK = Rhythm(interval_seconds=0.25, patience_seconds=1.5, limit_seconds=1800)


def watchers(before: set[threading.Thread]) -> int:
    names = [thread.name for thread in threading.enumerate() if thread not in before]
    own = ("failure-ring", "heartbeat", "receive-from-", "send-to-")
    return sum(name.startswith(own) for name in names)


def make_ring(
    group: dist.ProcessGroup,
    rhythm: Rhythm,
    on_failure: Callable[[str], None],
    on_notice: Callable[[str], None],
) -> FailureRing:
    return FailureRing(
        group,
        dist.get_rank(),
        dist.get_world_size(),
        rhythm,
        lambda: "testing",
        lambda failure: on_failure(str(failure)),
        lambda notice: on_notice(str(notice)),
    )


def fail_on(failing: int) -> tuple[list[str], int]:
    """Lets one rank fail; nobody closes the ring before all have told of its threads."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    learned: list[str] = []
    before = set(threading.enumerate())  # of cases that this process has run
    group = dist.new_group(timeout=timedelta(days=1))
    ring = make_ring(group, QUIET, learned.append, lambda _: None)
    assert watchers(before) == 4
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


@contextmanager
def watching(
    rhythm: Rhythm, on_failure: Callable[[str], None], on_notice: Callable[[str], None]
) -> Iterator[list[int]]:
    """Watches over the ranks, until all have come to its end; gives their process IDs."""
    dist.init_process_group("gloo")
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    group = dist.new_group(timeout=timedelta(days=1))
    ring = make_ring(group, rhythm, on_failure, on_notice)
    yield pids
    dist.barrier()
    ring.close()
    dist.destroy_process_group()


def compute_until(is_there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_there() and time.monotonic() < deadline:
        pass  # a rank that sleeps is a rank that stands still


def stop(stopped: int) -> list[str]:
    """Stops the process of one rank until it is missed; all ranks list their notices."""
    notices: list[str] = []
    failures: list[str] = []
    with watching(QUICK, failures.append, notices.append) as pids:
        # The one that is told: rank 0, or the predecessor of a rank 0 that is stopped itself.
        told = 0 if stopped else len(pids) - 1
        if dist.get_rank() == told:
            time.sleep(3 * QUICK.interval_seconds)  # for beats to come
            os.kill(pids[stopped], signal.SIGSTOP)
            compute_until(lambda: len(notices) == 1)
            os.kill(pids[stopped], signal.SIGCONT)
            compute_until(lambda: len(notices) == 2)
        dist.barrier()
        time.sleep(5 * QUICK.interval_seconds)  # a process that was stopped accuses no other one
    assert not failures
    return notices


@pytest.mark.some("1-3")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_process_is_named_once_and_its_return_too(
    workers: WorkerPool, world_size: int, stopped: int
) -> None:
    results = workers.run(world_size, stop, stopped)
    told = 0 if stopped else world_size - 1
    assert [len(notices) for notices in results] == [
        2 * (rank == told) for rank in range(world_size)
    ]
    missed, returned = results[told]
    assert missed.startswith(f"Rank {stopped} (process ")
    assert "has not answered for" in missed
    assert "It was testing, in `" in missed
    assert returned.startswith(f"Rank {stopped} (process ")
    assert "goes on after" in returned


def wait_alone(waiting: int) -> list[str]:
    """Lets one rank sleep, for which the others wait in a collective."""
    notices: list[str] = []
    with watching(QUICK, notices.append, notices.append):
        if dist.get_rank() == waiting:
            time.sleep(3 * QUICK.patience_seconds)
        dist.barrier()
        time.sleep(3 * QUICK.interval_seconds)
    return notices


@pytest.mark.long
@pytest.mark.parametrize("waiting", [0, 1, 2])
def test_a_rank_that_waits_is_named_and_not_those_that_wait_for_it(
    workers: WorkerPool, waiting: int
) -> None:
    notices = workers.run(3, wait_alone, waiting)[0]
    assert notices[0].startswith(f"Rank {waiting} (process ")
    assert "in `wait_alone` (test_failure_ring.py:" in notices[0]
    assert all(notice.startswith(f"Rank {waiting} (process ") for notice in notices)


def fall_silent(silent: int) -> str | None:
    """Stops one rank's process until its predecessor has given it up."""
    failures: list[str] = []
    is_predecessor = os.environ["RANK"] == str((silent - 1) % 3)
    rhythm = Rhythm(0.1, 0.3, 0.9 if is_predecessor else 1800)
    with watching(rhythm, failures.append, lambda _: None) as pids:
        if is_predecessor:
            time.sleep(0.3)
            os.kill(pids[silent], signal.SIGSTOP)
        if dist.get_rank() != silent:
            compute_until(lambda: bool(failures))
        if is_predecessor:
            os.kill(pids[silent], signal.SIGCONT)
    return failures[0] if failures else None


@pytest.mark.some("2")
@pytest.mark.parametrize("silent", [0, 2])
def test_a_rank_that_is_silent_for_the_whole_timeout_has_failed(
    workers: WorkerPool, silent: int
) -> None:
    results = workers.run(3, fall_silent, silent)
    for rank, failure in enumerate(results):
        if rank != silent:
            assert failure is not None
            assert failure.startswith(f"Rank {silent} failed first: Rank {silent} (process ")
            assert "has not answered for 1 s" in failure
