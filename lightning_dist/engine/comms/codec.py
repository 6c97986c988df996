"""Memory for received tensors, reused as soon as no tensor refers to it.

A receiver that allocates a fresh megabyte for each message pays for page faults each time. A
receiver that reuses one buffer blindly corrupts the tensors that still refer to it. A stage cannot
know which do: an identity layer returns its input, and the user may keep a prediction for ever. So
the pool asks the interpreter: a buffer is a Python object to which each tensor on it holds a
reference. A buffer without such references is free.

:class:`TreeReader` turns packets into trees.

A transport that fixes its shapes from the first micro-batch gives silently wrong gradients for
uneven ones. Here each message may differ from the one before. The schema of a message, its tree
without tensors and the tensors' infos, precedes the first message that differs.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from typing import Any

import torch

from lightning_dist.engine.comms.packet import Memory, PacketLayout, TensorInfo
from lightning_dist.engine.tensors.tree import unflatten


def _references(buffer: Memory) -> int:
    return sys.getrefcount(buffer)


def _references_of_a_free_buffer() -> int:
    """Counts the references that :meth:`BufferPool.take` itself holds to a free buffer."""
    count = 0
    for buffer in [_fresh(1)]:
        count = _references(buffer)
    return count


def _fresh(num_bytes: int) -> Memory:
    # Torch's memory begins where its kernels are fastest; a bytearray's does not.
    memory: Memory = torch.empty(num_bytes, dtype=torch.uint8).numpy()
    return memory


_REFERENCES_OF_A_FREE_BUFFER = _references_of_a_free_buffer()


class BufferPool:
    """Lends memory, which is free again when the last reference to it is gone."""

    def __init__(self) -> None:
        self._buffers: dict[int, list[Memory]] = {}

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all buffers, in use or free."""
        return sum(size * len(buffers) for size, buffers in self._buffers.items())

    def take(self, num_bytes: int) -> Memory:
        """Returns memory with arbitrary content.

        Args:
            num_bytes: Number of bytes; at least 1.

        Returns:
            Memory that is reused when no reference to it, and no tensor on it, is left.
        """
        buffers = self._buffers.setdefault(num_bytes, [])
        for buffer in buffers:
            if _references(buffer) <= _REFERENCES_OF_A_FREE_BUFFER:
                return buffer
        buffers.append(_fresh(num_bytes))
        return buffers[-1]


def schema_of(skeleton: Any, infos: Sequence[TensorInfo]) -> bytes:
    """Returns the schema of a message."""
    return pickle.dumps((skeleton, list(infos)))


NO_SCHEMA = schema_of(None, [])
"""The schema with which both ends of a new channel begin."""


class TreeReader:
    """Turns the packets of a channel into trees; for one thread.

    Args:
        device: Device of the trees' tensors.

    Attributes:
        layout: Layout of the expected packets.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = BufferPool()
        self._skeleton: Any = None
        self.layout = PacketLayout()

    def expect(self, schema: bytes) -> None:
        """Sets the schema of the next packets."""
        self._skeleton, infos = pickle.loads(schema)
        self.layout = PacketLayout(infos)

    def take_memory(self) -> Memory:
        """Returns memory for the next packet."""
        return self._pool.take(self.layout.num_bytes)

    def read(self, packet: Memory) -> Any:
        """Returns the tree of a packet."""
        tensors = [
            host.to(self._device).requires_grad_(info.requires_grad)
            for info, host in zip(self.layout.infos, self.layout.tensors(packet), strict=True)
        ]
        return unflatten(tensors, self._skeleton)
