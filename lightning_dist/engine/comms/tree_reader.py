"""Packets become trees again."""

from __future__ import annotations

from typing import Any

import torch

from lightning_dist.engine.comms.buffers import BufferPool
from lightning_dist.engine.comms.message_form import NO_FORM, read_content
from lightning_dist.engine.comms.packet import Memory, PacketLayout
from lightning_dist.engine.tensors.tree import unflatten


class TreeReader:
    """Reads packets of one way; for one thread.

    Args:
        device: Where the trees' tensors shall be.

    Attributes:
        layout: Of the packets that are expected.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = BufferPool()
        self._content = NO_FORM.content
        self._skeleton: Any = None
        self.layout = PacketLayout()

    def expect(self, content: bytes) -> None:
        """Notes what the next packets are like.

        Args:
            content: Of their form.
        """
        if content != self._content:
            self._skeleton, infos = read_content(content)
            self._content, self.layout = content, PacketLayout(infos)

    def take_memory(self) -> Memory:
        """Gives memory for the next packet."""
        return self._pool.take(self.layout.num_bytes)

    def read(self, packet: Memory) -> Any:
        """Gives the tree of a packet.

        Args:
            packet: In memory of this reader, which is used again when nobody holds the tree.
        """
        tensors = [
            host.to(self._device).requires_grad_(info.requires_grad)
            for info, host in zip(self.layout.infos, self.layout.tensors(packet), strict=True)
        ]
        return unflatten(tensors, self._skeleton)
