"""Memory for received tensors, used again as soon as nobody can see it.

A receiver that allocates a fresh megabyte for each message pays for page faults each time. A
receiver that reuses one buffer blindly corrupts whatever still looks at it, and a stage cannot know
who does: an identity layer hands its input on, and the user may keep a prediction for ever. So the
pool asks the interpreter: a buffer is a Python object to which each tensor on it holds a reference.
A buffer without such references is free.

What messages of a channel have in common.

A transport that fixes its shapes from the first micro-batch gives silently wrong gradients for
uneven ones. Here each message may differ from the one before. By the socket a form goes ahead of
the first that differs; in shared memory each packet has its form with it.

Packets become trees again.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_dist.engine.comms.packet import Memory, PacketLayout, TensorInfo
from lightning_dist.engine.comms.shared_ring import Offer
from lightning_dist.engine.tensors.tree import unflatten


def _references(buffer: Memory) -> int:
    return sys.getrefcount(buffer)


def _references_of_a_free_buffer() -> int:
    """Counts what :meth:`BufferPool.take` itself holds while it looks at a buffer.

    The pool's list, the loop variable and two arguments; not every interpreter counts them all.
    """
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
    """Hands out memory that returns by itself."""

    def __init__(self) -> None:
        self._buffers: dict[int, list[Memory]] = {}

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all buffers, in use or free."""
        return sum(size * len(buffers) for size, buffers in self._buffers.items())

    def take(self, num_bytes: int) -> Memory:
        """Gives memory with arbitrary content.

        Args:
            num_bytes: How much; at least 1.

        Returns:
            What is used again once nobody holds it, and no tensor on it is left.
        """
        buffers = self._buffers.setdefault(num_bytes, [])
        for buffer in buffers:
            if _references(buffer) <= _REFERENCES_OF_A_FREE_BUFFER:
                return buffer
        buffers.append(_fresh(num_bytes))
        return buffers[-1]


@dataclass(frozen=True, slots=True)
class MessageSchema:
    """What the next messages are like.

    Attributes:
        content: Pickled: the tree without its tensors, and what these are.
        offer: Of shared memory, if there is any.
    """

    content: bytes
    offer: Offer | None = None


def content_of(skeleton: Any, infos: Sequence[TensorInfo]) -> bytes:
    """Gives the content of a form.

    Args:
        skeleton: A tree without its tensors.
        infos: What these are.
    """
    return pickle.dumps((skeleton, list(infos)))


def read_content(content: bytes) -> tuple[Any, list[TensorInfo]]:
    """Gives a tree without its tensors, and what these are.

    Args:
        content: Of a form.
    """
    found: tuple[Any, list[TensorInfo]] = pickle.loads(content)
    return found


NO_FORM = MessageSchema(content_of(None, []))
"""What each end of a new channel takes for granted."""


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
