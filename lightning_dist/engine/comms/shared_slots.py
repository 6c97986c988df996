"""Which packets of a channel go through memory that its two ends share.

What lies in a slot of shared memory: a lead, the form's content, and a packet of that form.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from lightning_dist.engine.comms.batches.memory_file import can_make_files
from lightning_dist.engine.comms.codec import TreeReader
from lightning_dist.engine.comms.packet import (
    Memory,
    PacketHeader,
    PacketLayout,
    as_bytes,
    fill,
    read_lead,
    write_lead,
)
from lightning_dist.engine.comms.shared_ring import Offer, OfferedRing

_CONTENT_BEGINS = PacketLayout().num_bytes


def shared_bytes(content: bytes, layout: PacketLayout) -> int:
    """Tells what room a packet needs.

    Args:
        content: Of its form.
        layout: Of the packet.
    """
    return _packet_begins(len(content)) + layout.num_bytes


def write_shared(
    slot: Memory,
    lead: PacketHeader,
    content: bytes,
    layout: PacketLayout,
    tensors: Sequence[Tensor],
) -> None:
    """Fills a slot.

    Args:
        slot: Large enough.
        lead: Says how long the content is.
        content: Of the form.
        layout: Of the packet.
        tensors: What is in it.
    """
    write_lead(slot, lead)
    content_ends = _CONTENT_BEGINS + len(content)
    slot[_CONTENT_BEGINS:content_ends] = np.frombuffer(content, np.uint8)
    fill(layout, slot[_packet_begins(len(content)) :], tensors)


def read_shared(slot: Memory, reader: TreeReader) -> tuple[PacketHeader, object]:
    """Gives what a slot holds.

    Args:
        slot: Filled; nothing of what is returned is in its memory.
        reader: Makes the tree.
    """
    lead = read_lead(slot)
    reader.expect(slot[_CONTENT_BEGINS : _CONTENT_BEGINS + lead.num_bytes].tobytes())
    packet = reader.take_memory()
    begin = _packet_begins(lead.num_bytes)
    as_bytes(packet).copy_(as_bytes(slot[begin : begin + packet.size]))
    return lead, reader.read(packet)


def _packet_begins(content_bytes: int) -> int:
    step = PacketLayout().num_bytes
    return _CONTENT_BEGINS + -(-content_bytes // step) * step


LARGEST_PACKET_BYTES = 1 << 24
"""To copy more takes longer than the wakings that it saves, and all slots may be touched."""


class SharedRoom:
    """A sender's ring, whose slots have room for its largest packet but the very large."""

    def __init__(self) -> None:
        self._ring: OfferedRing | None = None
        self._can_offer = can_make_files()

    @property
    def offer(self) -> Offer | None:
        """What the receiver must know."""
        return None if self._ring is None else self._ring.offer

    def ring_for(self, num_bytes: int, tensors: Sequence[Tensor]) -> OfferedRing | None:
        """Gives the ring that a packet may go through.

        Args:
            num_bytes: Of the packet.
            tensors: What shall be in it. Those of a GPU want pinned memory.

        Returns:
            None where it must go by the socket; as long as the receiver has not accepted, too.
        """
        if num_bytes > LARGEST_PACKET_BYTES or any(t.device.type != "cpu" for t in tensors):
            return None
        if self._ring is None or self._ring.offer.slot_bytes < num_bytes:
            self._make(num_bytes)
        ring = self._ring
        return ring if ring is not None and ring.is_accepted else None

    def close(self) -> None:
        """Takes back what is offered."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def _make(self, num_bytes: int) -> None:
        self.close()
        if self._can_offer:
            try:
                self._ring = OfferedRing(num_bytes)
            except OSError:  # too many open files, say: there is the socket
                self._can_offer = False
