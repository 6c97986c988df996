"""Packets in memory that two processes of one host share."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import pytest

from lightning_dist.engine.comms.shared_ring import NUM_SLOTS, AcceptedRing, OfferedRing


@pytest.fixture
def offered() -> Iterator[OfferedRing]:
    ring = OfferedRing(5000)
    yield ring
    ring.close()


def put(ring: OfferedRing, value: int) -> bool:
    slot = ring.take()
    if slot is None:
        return False
    slot[:] = value
    ring.hand_over()
    return True


def test_packets_come_in_order_as_often_as_the_ring_goes_round(offered: OfferedRing) -> None:
    accepted = AcceptedRing.accept(offered.offer)
    assert accepted is not None
    assert accepted.take() is None
    for value in range(3 * NUM_SLOTS):
        assert put(offered, value)
        assert accepted.arrived.try_wait()
        slot = accepted.take()
        assert slot is not None
        assert slot.size == offered.offer.slot_bytes == 8192
        assert set(slot.tolist()) == {value}
        accepted.release()
    assert not accepted.arrived.try_wait()


def test_a_full_ring_has_no_room_until_a_packet_is_released(offered: OfferedRing) -> None:
    accepted = AcceptedRing.accept(offered.offer)
    assert accepted is not None
    assert [put(offered, value) for value in range(NUM_SLOTS + 1)] == [True] * NUM_SLOTS + [False]
    first = accepted.take()
    assert first is not None
    assert not put(offered, 99), "it is read still"
    accepted.release()
    assert put(offered, 99)


def test_a_sender_sees_whether_its_offer_is_accepted(offered: OfferedRing) -> None:
    assert not offered.is_accepted
    assert AcceptedRing.accept(offered.offer) is not None
    assert offered.is_accepted


def test_an_offer_that_is_not_this_hosts_is_not_accepted(offered: OfferedRing) -> None:
    other = OfferedRing(5000)
    for change in (
        {"secret": other.offer.secret},
        {"descriptor": other.offer.descriptor},
        {"slot_bytes": 4096},
        {"process": 2**22 + 1},
    ):
        assert AcceptedRing.accept(dataclasses.replace(offered.offer, **change)) is None, change
    assert not offered.is_accepted
    assert not other.is_accepted
    other.close()
    assert AcceptedRing.accept(other.offer) is None


def test_what_is_no_such_memory_is_not_even_opened(offered: OfferedRing) -> None:
    reading, writing = os.pipe()  # to open one end would wait for the other
    pipe = dataclasses.replace(offered.offer, descriptor=reading)
    assert AcceptedRing.accept(pipe) is None
    os.close(reading)
    os.close(writing)


def test_nothing_is_left_open(offered: OfferedRing) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        ring = OfferedRing(100)
        accepted = AcceptedRing.accept(ring.offer)
        ring.close()
        del ring, accepted
    assert len(os.listdir("/proc/self/fd")) == before
