"""Ranks that meet at a store, which may be that of earlier attempts of a launcher."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_dist.engine.comms import meeting
from lightning_dist.engine.comms.contact import ContactError
from lightning_dist.engine.comms.meeting import Meeting, describe_missing, join, meet
from tests.helpers.processes.workers import free_port

PLACE = Meeting("127.0.0.1", 29500, 0, 3, ranks_per_host=1, timeout_seconds=10, serves=False)


def joined(store: dist.Store, *places: Meeting) -> list[Future[dist.Store]]:
    with ThreadPoolExecutor(len(places)) as threads:
        return [threads.submit(join, store, place) for place in places]


def attempt(store: dist.Store, ranks: Sequence[int], size: int) -> list[dist.Store]:
    places = [replace(PLACE, rank=rank, world_size=size) for rank in ranks]
    return [run.result() for run in joined(store, *places)]


def assert_apart(*attempts: list[dist.Store]) -> None:
    """Checks that what a rank writes is seen in its own attempt alone."""
    for number, stores in enumerate(attempts):
        stores[0].set("number", str(number))
    for number, stores in enumerate(attempts):
        assert {store.get("number") for store in stores} == {str(number).encode()}


def errors(*runs: Future[dist.Store]) -> set[str]:
    return {f"{type(run.exception()).__name__}: {run.exception()}" for run in runs}


def test_each_attempt_has_a_part_of_the_store() -> None:
    store = dist.HashStore()
    assert_apart(*(attempt(store, range(size), size) for size in (2, 3, 4, 2, 3)))


def test_ranks_that_have_asked_and_died_do_not_confuse_the_next_attempt() -> None:
    store = dist.HashStore()
    for rank in (1, 2):
        with pytest.raises(ContactError, match="rank 0 has not answered"):  # as if it had ended
            join(store, replace(PLACE, rank=rank, timeout_seconds=0.05))
    # The slowest rank is the first, then the last.
    assert_apart(*(attempt(store, order, 3) for order in ([1, 2, 0], [0, 1, 2])))


def test_a_first_rank_that_has_died_does_not_confuse_the_next_attempt() -> None:
    store = dist.HashStore()
    with pytest.raises(TimeoutError, match="1 of 3 ranks have met; missing: 1"):
        join(store, replace(PLACE, timeout_seconds=0.05))
    assert len(attempt(store, range(3), 3)) == 3


def test_all_ranks_name_the_one_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting.socket, "gethostname", lambda: "somewhere")
    short = replace(PLACE, world_size=4, ranks_per_host=2, timeout_seconds=0.5)
    (error,) = errors(*joined(dist.HashStore(), short, *(replace(short, rank=r) for r in (1, 2))))
    assert error.startswith("TimeoutError: 3 of 4 ranks have met; missing: 3 (somewhere) within")


def test_a_first_rank_that_waits_says_for_which(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meeting, "EARLY_SECONDS", 0.05)
    with pytest.raises(TimeoutError):
        join(dist.HashStore(), replace(PLACE, timeout_seconds=0.2))
    told = capsys.readouterr().err
    assert told.count("1 of 3 ranks have met; missing: 1 (host number 1, of which no rank") == 1


def test_ranks_that_count_other_numbers_of_ranks_are_refused_on_all() -> None:
    others = replace(PLACE, rank=1), replace(PLACE, rank=3, world_size=4)
    (error,) = errors(*joined(dist.HashStore(), PLACE, *others))
    assert error.startswith("ValueError: Rank 3 on host")
    assert "counts 4 ranks" in error
    assert "counts 3. Give the Trainer the same `devices`" in error


def test_two_processes_of_one_rank_are_refused_on_all() -> None:
    (error,) = errors(*joined(dist.HashStore(), PLACE, *[replace(PLACE, rank=1)] * 2))
    assert error.startswith("ValueError: Two processes are rank 1, on the hosts")


def test_another_hosts_rank_0_is_refused_on_both() -> None:
    store = dist.HashStore()
    store.compare_set(meeting._FIRST, "", "process 1 of host far")
    far = replace(PLACE, serves=False)
    (error,) = errors(*joined(store, far, replace(PLACE, serves=True)))
    assert error.startswith("ValueError: Two processes are rank 0, on the hosts")


def test_the_store_of_a_run_that_has_begun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "EARLY_SECONDS", 0.1)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    here = replace(PLACE, port=server.port, rank=1, serves=True, timeout_seconds=60)
    with pytest.raises(ContactError, match=r"has not answered rank 1 .* within 0.1 s.*MASTER_PORT"):
        meet(here)


def test_ranks_meet_at_the_port_of_the_first() -> None:
    here = replace(PLACE, port=free_port(), serves=True)
    for _ in range(2):  # a process may form several groups in turn
        with ThreadPoolExecutor(3) as threads:
            runs = [threads.submit(meet, replace(here, rank=rank)) for rank in range(3)]
        stores = [run.result() for run in runs]
        assert_apart(stores)
        assert stores[0].timeout == timedelta(seconds=10)


def test_one_rank_needs_no_port() -> None:
    meet(replace(PLACE, port=-1, world_size=1, serves=True)).set("key", "value")


def test_missing_ranks_are_named_with_their_hosts() -> None:
    assert describe_missing(4, {0: "a", 1: "a", 3: "b"}, 2).endswith("missing: 2 (b)")
    # A host of which no rank came has said no name.
    found = describe_missing(4, {0: "a"}, 2)
    assert found.endswith("missing: 1 (a); 2, 3 (host number 1, of which no rank came)")
    assert describe_missing(4, {0: "a", 1: "b"}, 0).endswith("missing: 2, 3 (unknown hosts)")
