"""A message between two ranks as one run of bytes.

The cost of a small message is not its bytes but the threads that it wakes. For each separate piece
the sender makes a system call, and the receiver's network thread and a waiting thread wake up. A
header of three integers took as long as the following quarter of a megabyte. So the header and all
tensors are copied into one packet, which takes a tenth of that, and travel together.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Memory = npt.NDArray[np.uint8]  # a run of bytes that can be written to

_HEADER = struct.Struct("<2q")
# Each tensor begins at a multiple of this: a cache line, and a multiple of any number's size.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's properties without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_on_host: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorInfo:
        """Creates the info of a tensor."""
        is_on_host = tensor.device.type == "cpu"
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, is_on_host)

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


class PacketKind(IntEnum):
    """What a packet's header announces."""

    TREE = 0  # a tree, in this packet; the header's value is its tag
    SCHEMA = 1  # the schema of the packets from now on, which comes next; its number of bytes
    CLOSE = 2  # the end of the channel


class PacketLayout:
    """The places of a header and some tensors in a packet."""

    def __init__(self, infos: Sequence[TensorInfo] = ()) -> None:
        self.infos = tuple(infos)
        self._begins: list[int] = []
        self.num_bytes = _aligned(_HEADER.size)  # of the whole packet
        for info in self.infos:
            self._begins.append(self.num_bytes)
            self.num_bytes = _aligned(self.num_bytes + info.num_bytes)

    def tensors(self, memory: Memory) -> Iterator[Tensor]:
        """Yields the tensors of a packet."""
        for info, begin in zip(self.infos, self._begins, strict=True):
            count = math.prod(info.shape)
            if count == 0:
                yield torch.empty(info.shape, dtype=info.dtype)
            else:
                flat = torch.frombuffer(memory, dtype=info.dtype, count=count, offset=begin)
                yield flat.view(info.shape)


def write_header(memory: Memory, kind: PacketKind, value: int) -> None:
    """Writes the header into a packet."""
    _HEADER.pack_into(memory.data, 0, kind, value)


def read_header(memory: Memory) -> tuple[PacketKind, int]:
    """Returns the header of a packet."""
    kind, value = _HEADER.unpack_from(memory.data)
    return PacketKind(kind), value


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
