from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from lightning_dist.doctor import meeting
from lightning_dist.doctor.meeting import Meeting, judge_contact, judge_meeting
from lightning_dist.doctor.report import Status, StoppedError
from tests.helpers.processes.workers import free_port
from tests.unit.doctor.facts import LAUNCH


def test_missing_ranks_are_named_with_their_hosts() -> None:
    assert judge_meeting(LAUNCH, {0: "a", 1: "a", 2: "b", 3: "b"}).status is Status.OK
    result = judge_meeting(LAUNCH, {0: "a", 1: "a", 3: "b"})
    assert result.status is Status.FAIL
    assert result.found == "3 of 4 ranks have met; missing: 2 (b)"
    # A host of which no rank came has said no name.
    result = judge_meeting(LAUNCH, {0: "a"})
    assert "missing: 1 (a); 2, 3 (host number 1, of which no rank came)" in result.found
    unknown = replace(LAUNCH, ranks_per_host=0)
    assert "2, 3 (unknown hosts)" in judge_meeting(unknown, {0: "a", 1: "b"}).found


def contact_error(launch_port: int) -> str:
    launch = replace(LAUNCH, rank=1, address="127.0.0.1", port=launch_port)
    with pytest.raises(StoppedError) as caught:
        Meeting(launch, seconds=0.1)
    return caught.value.result.found


def test_a_port_at_which_nothing_listens_is_named() -> None:
    assert "nothing listens at 127.0.0.1" in contact_error(free_port())


def test_a_port_that_drops_what_is_sent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_CONNECT_SECONDS", 0.2)
    with socket.socket() as full, socket.socket() as one, socket.socket() as two:
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # Linux drops what comes when its queue is full, as a firewall does
        for other in (one, two):
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        assert "does not answer" in contact_error(full.getsockname()[1])


def test_reasons_have_their_remedies() -> None:
    assert "firewall" in judge_contact(LAUNCH, TimeoutError()).remedy
    assert "Has rank 0 started" in judge_contact(LAUNCH, ConnectionRefusedError()).remedy
    assert "unknown here" in judge_contact(LAUNCH, socket.gaierror()).found
    assert "no route" in judge_contact(LAUNCH, OSError("no route")).found


def test_a_stranger_at_the_port_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "GRACE_SECONDS", 0.1)
    port = free_port()
    launch = replace(LAUNCH, address="127.0.0.1", port=port, world_size=2, serves=True)
    stranger = Meeting(launch, seconds=1.0)  # a store, but no doctor answers there
    second = Meeting(replace(launch, rank=1), seconds=0.2)
    with pytest.raises(StoppedError, match="rank 0 has not answered"):
        second.meet()
    del stranger
