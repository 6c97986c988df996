"""What lies in a slot of shared memory: a lead, the form's content, and a packet of that form."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from lightning_dist.engine.comms.packet import (
    Lead,
    Memory,
    PacketLayout,
    as_bytes,
    fill,
    read_lead,
    write_lead,
)
from lightning_dist.engine.comms.tree_reader import TreeReader

_CONTENT_BEGINS = PacketLayout().num_bytes


def shared_bytes(content: bytes, layout: PacketLayout) -> int:
    """Tells what room a packet needs.

    Args:
        content: Of its form.
        layout: Of the packet.
    """
    return _packet_begins(len(content)) + layout.num_bytes


def write_shared(
    slot: Memory, lead: Lead, content: bytes, layout: PacketLayout, tensors: Sequence[Tensor]
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


def read_shared(slot: Memory, reader: TreeReader) -> tuple[Lead, object]:
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
