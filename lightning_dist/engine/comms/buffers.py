"""Memory for received tensors, used again as soon as nobody can see it.

A receiver that allocates a fresh megabyte for each message pays for page faults each time. A
receiver that reuses one buffer blindly corrupts whatever still looks at it, and a stage cannot know
who does: an identity layer hands its input on, and the user may keep a prediction for ever. So the
pool asks the interpreter: a buffer is a Python object to which each tensor on it holds a reference.
A buffer without such references is free.
"""

from __future__ import annotations

import sys

import torch

from lightning_dist.engine.comms.packet import Memory


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
