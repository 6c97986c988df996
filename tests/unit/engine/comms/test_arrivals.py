"""What comes to a receiver by two ways."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from lightning_dist.engine.comms.packet import Memory
from lightning_dist.engine.comms.receiver import Arrivals
from lightning_dist.engine.comms.shared_ring import NUM_SLOTS, AcceptedRing, OfferedRing


def first_byte(slot: Memory) -> int:
    return int(slot[0])


@pytest.fixture
def arrivals() -> Arrivals[int]:
    return Arrivals(first_byte)


@pytest.fixture
def offered() -> Iterator[OfferedRing]:
    ring = OfferedRing(100)
    yield ring
    ring.close()


def attach(arrivals: Arrivals[int], offered: OfferedRing) -> None:
    ring = AcceptedRing.accept(offered.offer)
    assert ring is not None
    arrivals.attach(ring)


def hand_over(offered: OfferedRing, value: int) -> None:
    slot = offered.take()
    assert slot is not None
    slot[0] = value
    offered.hand_over()


def take_all(arrivals: Arrivals[int]) -> list[int]:
    found = []
    while True:
        try:
            found.append(arrivals.take(0.0))
        except queue.Empty:
            return found


def test_what_came_before_shared_memory_comes_first(
    arrivals: Arrivals[int], offered: OfferedRing
) -> None:
    arrivals.put(1)
    attach(arrivals, offered)
    hand_over(offered, 2)
    assert take_all(arrivals) == [1, 2]


def test_both_ways_are_looked_at_and_packets_come_first(
    arrivals: Arrivals[int], offered: OfferedRing
) -> None:
    attach(arrivals, offered)
    arrivals.put(3)
    hand_over(offered, 1)
    hand_over(offered, 2)
    assert take_all(arrivals) == [1, 2, 3]


def test_nothing_is_lost_where_shared_memory_takes_the_place_of_other(
    arrivals: Arrivals[int], offered: OfferedRing
) -> None:
    attach(arrivals, offered)
    arrivals.put(2)
    hand_over(offered, 1)
    larger = OfferedRing(10_000)
    attach(arrivals, larger)
    hand_over(larger, 3)
    arrivals.put(4)
    assert take_all(arrivals) == [1, 2, 3, 4]
    larger.close()


def test_a_slot_is_free_again_when_it_has_been_read(
    arrivals: Arrivals[int], offered: OfferedRing
) -> None:
    attach(arrivals, offered)
    for value in range(3 * NUM_SLOTS):
        hand_over(offered, value)
        assert arrivals.take(0.0) == value


def test_a_slot_that_cannot_be_read_is_free_again(offered: OfferedRing) -> None:
    def refuse(slot: Memory) -> int:
        raise KeyError("unreadable")

    arrivals = Arrivals(refuse)
    attach(arrivals, offered)
    for _ in range(2 * NUM_SLOTS):
        hand_over(offered, 1)
        with pytest.raises(KeyError, match="unreadable"):
            arrivals.take(0.0)


@pytest.mark.parametrize("is_attached", [False, True])
def test_who_waits_is_woken(
    arrivals: Arrivals[int], offered: OfferedRing, is_attached: bool
) -> None:
    if is_attached:
        attach(arrivals, offered)
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.append(arrivals.take(10.0)))
    waiting.start()
    arrivals.put(5)
    waiting.join(10.0)
    assert found == [5]


def test_who_waits_at_the_queue_turns_to_shared_memory(
    arrivals: Arrivals[int], offered: OfferedRing
) -> None:
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.append(arrivals.take(10.0)))
    waiting.start()
    attach(arrivals, offered)
    hand_over(offered, 6)
    waiting.join(10.0)
    assert found == [6]
