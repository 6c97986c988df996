"""A message between two ranks as one run of bytes.

What a small message costs is not its bytes but its wakings: each piece that is sent by itself has
the sender ask the system, the receiver's network thread wake up, and with it a thread that waits. A
lead of three integers took as long as the quarter of a megabyte behind it. So the lead and all
tensors are copied one behind the other, which takes a tenth of that, and travel together.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Memory: TypeAlias = bytearray | memoryview
"""A run of bytes that can be written to."""

_LEAD = struct.Struct("<3q")
# Of a cache line, and a multiple of the size of any number: what a tensor begins at.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a tensor is without its values.

    Attributes:
        shape: Its sizes.
        dtype: Its data type.
        requires_grad: Whether a gradient of it is wanted.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Lead:
    """What a packet begins with.

    Attributes:
        notice: 0 for a packet of the kind that is expected; anything else says what comes.
        port: Who waits for it.
        stamp: What it is about.
    """

    notice: int
    port: int = 0
    stamp: int = 0


class PacketLayout:
    """Where a lead and some tensors lie in a packet.

    Args:
        infos: Of the tensors.
    """

    def __init__(self, infos: Sequence[TensorInfo] = ()) -> None:
        self.infos = tuple(infos)
        self._begins: list[int] = []
        self.num_bytes = _aligned(_LEAD.size)
        for info in self.infos:
            self._begins.append(self.num_bytes)
            self.num_bytes = _aligned(self.num_bytes + info.num_bytes)

    def tensors(self, memory: Memory) -> Iterator[Tensor]:
        """Gives the tensors that lie in a packet.

        Args:
            memory: Of :attr:`num_bytes`; each tensor holds a reference to it.

        Yields:
            Each by itself: what is written into one is no change of the others to autograd.
        """
        for info, begin in zip(self.infos, self._begins, strict=True):
            count = math.prod(info.shape)
            if count == 0:
                yield torch.empty(info.shape, dtype=info.dtype)
            else:
                flat = torch.frombuffer(memory, dtype=info.dtype, count=count, offset=begin)
                yield flat.view(info.shape)


def write_lead(memory: Memory, lead: Lead) -> None:
    """Puts a lead into a packet.

    Args:
        memory: Of the packet.
        lead: What it shall begin with.
    """
    _LEAD.pack_into(memory, 0, lead.notice, lead.port, lead.stamp)


def read_lead(memory: Memory) -> Lead:
    """Gives the lead of a packet.

    Args:
        memory: Of the packet.
    """
    return Lead(*_LEAD.unpack_from(memory))


def as_bytes(memory: Memory) -> Tensor:
    """Gives all of a packet as a tensor of bytes, in the same memory.

    Args:
        memory: Of the packet.
    """
    return torch.frombuffer(memory, dtype=torch.uint8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
