"""The choice of packets that go through memory that both ends of a channel share.

A slot of shared memory holds a header, the schema's content, and a packet of that schema.
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
    """Returns the bytes that a packet needs in a slot.

    Args:
        content: Content of the packet's schema.
        layout: Layout of the packet.
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
        slot: A slot that is large enough.
        lead: The header, with the content's length.
        content: Content of the schema.
        layout: Layout of the packet.
        tensors: Tensors of the packet.
    """
    write_lead(slot, lead)
    content_ends = _CONTENT_BEGINS + len(content)
    slot[_CONTENT_BEGINS:content_ends] = np.frombuffer(content, np.uint8)
    fill(layout, slot[_packet_begins(len(content)) :], tensors)


def read_shared(slot: Memory, reader: TreeReader) -> tuple[PacketHeader, object]:
    """Returns the header and the tree of a slot.

    Args:
        slot: A filled slot; the tree does not use its memory.
        reader: Creates the tree.
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
"""To copy larger packets takes longer than the saved wake-ups, and may use all slots' memory."""


class SharedRoom:
    """A sender's ring, with slots for its largest packet of at most ``LARGEST_PACKET_BYTES``."""

    def __init__(self) -> None:
        self._ring: OfferedRing | None = None
        self._can_offer = can_make_files()

    @property
    def offer(self) -> Offer | None:
        """The offer for the receiver; None if there is no ring."""
        return None if self._ring is None else self._ring.offer

    def ring_for(self, num_bytes: int, tensors: Sequence[Tensor]) -> OfferedRing | None:
        """Returns the ring for a packet.

        Args:
            num_bytes: Bytes of the packet.
            tensors: Tensors of the packet; a GPU's tensors need pinned memory, so the socket.

        Returns:
            The ring; None if the packet must use the socket, or the receiver has not accepted yet.
        """
        if num_bytes > LARGEST_PACKET_BYTES or any(t.device.type != "cpu" for t in tensors):
            return None
        if self._ring is None or self._ring.offer.slot_bytes < num_bytes:
            self._make(num_bytes)
        ring = self._ring
        return ring if ring is not None and ring.is_accepted else None

    def close(self) -> None:
        """Withdraws the offer."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def _make(self, num_bytes: int) -> None:
        self.close()
        if self._can_offer:
            try:
                self._ring = OfferedRing(num_bytes)
            except OSError:  # too many open files, say: the socket remains
                self._can_offer = False
