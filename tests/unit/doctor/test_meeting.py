from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_dist.doctor import meeting
from lightning_dist.doctor.meeting import Meeting, judge_meeting
from lightning_dist.doctor.report import Status, StoppedError
from tests.helpers.processes.workers import free_port
from tests.unit.doctor.facts import LAUNCH


def test_missing_ranks_are_named() -> None:
    came = {0: ("a", 4), 1: ("a", 4), 2: ("b", 4), 3: ("b", 4)}
    assert judge_meeting(LAUNCH, came).status is Status.OK
    del came[2]
    result = judge_meeting(LAUNCH, came)
    assert result.status is Status.FAIL
    assert result.found == "3 of 4 ranks have met; missing: 2 (b)"


def test_ranks_that_count_others_are_named() -> None:
    result = judge_meeting(LAUNCH, {0: ("a", 4), 1: ("a", 4), 2: ("b", 2), 3: ("b", 4)})
    assert result.status is Status.FAIL
    assert "rank 2 of 2 (b)" in result.found


def test_a_port_at_which_nothing_listens_is_named() -> None:
    launch = replace(LAUNCH, rank=1, address="127.0.0.1", port=free_port())
    with pytest.raises(StoppedError) as caught:
        Meeting(launch, seconds=0.1)
    assert "nothing listens at MASTER_ADDR=127.0.0.1" in caught.value.result.found
    assert "Has rank 0 started" in caught.value.result.remedy


def test_a_stranger_at_the_port_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "GRACE_SECONDS", 0.1)
    port = free_port()
    launch = replace(LAUNCH, address="127.0.0.1", port=port, world_size=2, serves=True)
    stranger = Meeting(launch, seconds=1.0)  # a store, but no doctor answers there
    second = Meeting(replace(launch, rank=1), seconds=0.2)
    with pytest.raises(StoppedError, match="rank 0 has not answered"):
        second.meet()
    del stranger
