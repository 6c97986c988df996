"""Which packets of a channel go through memory that its two ends share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lightning_dist.engine.comms import shared_ring
from lightning_dist.engine.comms.shared_ring import AcceptedRing
from lightning_dist.engine.comms.shared_slots import LARGEST_PACKET_BYTES, SharedRoom


@pytest.fixture
def room() -> Iterator[SharedRoom]:
    room = SharedRoom()
    yield room
    room.close()


def accept(room: SharedRoom) -> AcceptedRing:
    assert room.offer is not None
    ring = AcceptedRing.accept(room.offer)
    assert ring is not None
    return ring


def test_a_ring_is_used_when_it_is_accepted(room: SharedRoom) -> None:
    assert room.offer is None
    assert room.ring_for(5000, []) is None
    accept(room)
    ring = room.ring_for(5000, [torch.ones(2)])
    assert ring is not None
    assert ring.offer == room.offer


def test_a_larger_packet_needs_another_offer(room: SharedRoom) -> None:
    room.ring_for(5000, [])
    accept(room)
    small = room.offer
    assert small is not None
    assert room.ring_for(small.slot_bytes, []) is not None
    assert room.offer == small
    assert room.ring_for(small.slot_bytes + 1, []) is None, "nobody has accepted that one"
    assert room.offer is not None
    assert room.offer.slot_bytes == 2 * small.slot_bytes
    accept(room)
    assert room.ring_for(5000, []) is not None


@pytest.mark.parametrize(
    ("num_bytes", "tensors"),
    [(LARGEST_PACKET_BYTES + 1, []), (5000, [torch.ones(2), torch.ones(2, device="meta")])],
)
def test_what_goes_by_the_socket(
    room: SharedRoom, num_bytes: int, tensors: list[torch.Tensor]
) -> None:
    room.ring_for(LARGEST_PACKET_BYTES, [])
    accept(room)
    assert room.ring_for(num_bytes, tensors) is None
    assert room.ring_for(LARGEST_PACKET_BYTES, tensors[:1]) is not None


def test_a_system_that_has_none(room: SharedRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(shared_ring.os, "memfd_create", refuse)
    assert room.ring_for(5000, []) is None
    assert room.offer is None
    monkeypatch.undo()
    assert room.ring_for(5000, []) is None, "it does not ask for each packet"
    assert room.offer is None
