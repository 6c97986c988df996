"""A message between two ranks as one run of bytes.

What a small message costs is not its bytes but its wakings: each piece that is sent by itself has
the sender ask the system, the receiver's network thread wake up, and with it a thread that waits. A
lead of three integers took as long as the quarter of a megabyte behind it. So the lead and all
tensors are copied one behind the other, which takes a tenth of that, and travel together; or the
packet lies in :mod:`memory that both share <.comms.shared_ring>`.
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

Memory = npt.NDArray[np.uint8]
"""A run of bytes that can be written to."""

_LEAD = struct.Struct("<4q")
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

    @classmethod
    def of(cls, tensor: Tensor) -> TensorInfo:
        """Tells what a tensor is.

        Args:
            tensor: Any.
        """
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


class PacketKind(IntEnum):
    """What a lead tells of."""

    TREE = 0
    """A tree, in this packet."""
    FORM = 1
    """What the packets from now on are like, which comes next."""
    CLOSE = 2
    """The channel ends."""


@dataclass(frozen=True, slots=True)
class PacketHeader:
    """What a packet begins with.

    Attributes:
        notice: What it tells of.
        number: Messages that the sender has sent before.
        num_bytes: Of the form, where one comes with the packet or next.
        port: Who waits for the tree.
    """

    notice: PacketKind
    number: int = 0
    num_bytes: int = 0
    port: int = 0


class PacketLayout:
    """Where a lead and some tensors lie in a packet.

    Args:
        infos: Of the tensors.

    Attributes:
        begins: Bytes before each tensor.
        num_bytes: Of the whole packet.
    """

    def __init__(self, infos: Sequence[TensorInfo] = ()) -> None:
        self.infos = tuple(infos)
        self.begins: list[int] = []
        self.num_bytes = _aligned(_LEAD.size)
        for info in self.infos:
            self.begins.append(self.num_bytes)
            self.num_bytes = _aligned(self.num_bytes + info.num_bytes)

    def tensors(self, memory: Memory) -> Iterator[Tensor]:
        """Gives the tensors that lie in a packet.

        Args:
            memory: Of at least :attr:`num_bytes`; each tensor holds a reference to it.

        Yields:
            Each by itself: what is written into one is no change of the others to autograd.
        """
        for info, begin in zip(self.infos, self.begins, strict=True):
            count = math.prod(info.shape)
            if count == 0:
                yield torch.empty(info.shape, dtype=info.dtype)
            else:
                flat = torch.frombuffer(memory, dtype=info.dtype, count=count, offset=begin)
                yield flat.view(info.shape)


def write_lead(memory: Memory, lead: PacketHeader) -> None:
    """Puts a lead into a packet.

    Args:
        memory: Of the packet.
        lead: What it shall begin with.
    """
    _LEAD.pack_into(memory.data, 0, lead.notice, lead.number, lead.num_bytes, lead.port)


def fill(layout: PacketLayout, memory: Memory, tensors: Sequence[Tensor]) -> None:
    """Copies tensors into a packet.

    Args:
        layout: Of the packet.
        memory: Of the packet.
        tensors: Those of the layout; none leave its room as it is.
    """
    for place, tensor in zip(layout.tensors(memory), tensors, strict=False):
        place.copy_(tensor.detach())


def read_lead(memory: Memory) -> PacketHeader:
    """Gives the lead of a packet.

    Args:
        memory: Of the packet.
    """
    notice, number, num_bytes, port = _LEAD.unpack_from(memory.data)
    return PacketHeader(PacketKind(notice), number, num_bytes, port)


def as_bytes(memory: Memory) -> Tensor:
    """Gives all of a packet as a tensor of bytes, in the same memory.

    Args:
        memory: Of the packet.
    """
    return torch.frombuffer(memory, dtype=torch.uint8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
