"""A message between two ranks as one run of bytes.

The cost of a small message is not its bytes but the threads that it wakes. For each separate piece
the sender makes a system call, and the receiver's network thread and a waiting thread wake up. A
header of three integers took as long as the following quarter of a megabyte. So the header and all
tensors are copied into one packet, which takes a tenth of that, and travel together.

A transport that fixes its shapes from the first micro-batch gives silently wrong gradients for
uneven ones. Here the schema of a message, its tree without tensors and the tensors' infos, precedes
the first message that differs.
"""

from __future__ import annotations

import math
import pickle
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_dist.engine.tensors.tree import unflatten

Memory = npt.NDArray[np.uint8]  # a run of bytes that can be written to

_HEADER = struct.Struct("<3q")
# Each tensor begins at a multiple of this: a cache line, and a multiple of any number's size.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's properties without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorInfo:
        """Creates the info of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


class PacketKind(IntEnum):
    """What a packet's header announces."""

    TREE = 0  # a tree, in this packet
    SCHEMA = 1  # the schema of the packets from now on, which comes next
    CLOSE = 2  # the end of the channel


@dataclass(frozen=True, slots=True)
class PacketHeader:
    """The header of a packet.

    Attributes:
        kind: What the header announces.
        num_bytes: Bytes of the schema, if one comes next.
        tag: Tag of the tree, which names its receiving stage and micro-batch.
    """

    kind: PacketKind
    num_bytes: int = 0
    tag: int = 0


class PacketLayout:
    """The places of a header and some tensors in a packet.

    Args:
        infos: Infos of the tensors.

    Attributes:
        begins: Bytes before each tensor.
        num_bytes: Bytes of the whole packet.
    """

    def __init__(self, infos: Sequence[TensorInfo] = ()) -> None:
        self.infos = tuple(infos)
        self.begins: list[int] = []
        self.num_bytes = _aligned(_HEADER.size)
        for info in self.infos:
            self.begins.append(self.num_bytes)
            self.num_bytes = _aligned(self.num_bytes + info.num_bytes)

    def tensors(self, memory: Memory) -> Iterator[Tensor]:
        """Yields the tensors of a packet."""
        for info, begin in zip(self.infos, self.begins, strict=True):
            count = math.prod(info.shape)
            if count == 0:
                yield torch.empty(info.shape, dtype=info.dtype)
            else:
                flat = torch.frombuffer(memory, dtype=info.dtype, count=count, offset=begin)
                yield flat.view(info.shape)


def write_header(memory: Memory, header: PacketHeader) -> None:
    """Writes the header into a packet."""
    _HEADER.pack_into(memory.data, 0, header.kind, header.num_bytes, header.tag)


def read_header(memory: Memory) -> PacketHeader:
    """Returns the header of a packet."""
    kind, num_bytes, tag = _HEADER.unpack_from(memory.data)
    return PacketHeader(PacketKind(kind), num_bytes, tag)


def as_bytes(memory: Memory) -> Tensor:
    """Returns a whole packet as a tensor of bytes, in the same memory."""
    return torch.frombuffer(memory, dtype=torch.uint8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _references_of_a_free_buffer() -> int:
    """Counts the references that :meth:`BufferPool.take` itself holds to a free buffer."""
    count = 0  # the pool's list, the loop variable, the argument; not all interpreters count all
    for buffer in [_fresh(1)]:
        count = sys.getrefcount(buffer)
    return count


def _fresh(num_bytes: int) -> Memory:
    # Torch's memory begins where its kernels are fastest; a bytearray's does not.
    memory: Memory = torch.empty(num_bytes, dtype=torch.uint8).numpy()
    return memory


_REFERENCES_OF_A_FREE_BUFFER = _references_of_a_free_buffer()


class BufferPool:
    """Memory for received tensors, reused as soon as no tensor refers to it.

    A receiver that allocates a fresh megabyte for each message pays for page faults each time. One
    that reuses a buffer blindly corrupts the tensors that still refer to it. A stage cannot know
    which do: an identity layer returns its input, and the user may keep a prediction for ever. So
    the pool asks the interpreter: each tensor on a buffer holds a reference to it.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, list[Memory]] = {}

    def take(self, num_bytes: int) -> Memory:
        """Returns at least one byte of memory, with arbitrary content."""
        buffers = self._buffers.setdefault(num_bytes, [])
        for buffer in buffers:
            if sys.getrefcount(buffer) <= _REFERENCES_OF_A_FREE_BUFFER:
                return buffer
        buffers.append(_fresh(num_bytes))
        return buffers[-1]


def schema_of(skeleton: Any, infos: Sequence[TensorInfo]) -> bytes:
    """Returns the schema of a message."""
    return pickle.dumps((skeleton, list(infos)))


NO_SCHEMA = schema_of(None, [])  # with which both ends of a new channel begin


class TreeReader:
    """Turns the packets of a channel into trees; for one thread."""

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
