"""Both ends of a channel to another process, over a gloo process group.

No thread with work waits: a send is begun and left to itself, and a thread posts the receive of the
next packet before that packet is sent. There is one communicator per direction: two ranks that send
to each other on one depend on the order of their calls. The schema of a message, its tree without
tensors and the tensors' infos, precedes the first message that differs, since shapes that are fixed
by the first micro-batch give silently wrong gradients for uneven ones.

The cost of a small message is not its bytes but the threads that it wakes. For each separate piece
the sender makes a system call, and the receiver's network thread and a waiting thread wake up. A
header of three integers took as long as the following quarter of a megabyte. So the header and all
tensors are copied into one packet, which takes a tenth of that, and travel together.

Gloo alone takes CPU tensors and several ranks on one GPU. Tensors of a GPU are copied to the host
before they are sent.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import struct
import threading
from collections.abc import Hashable, Iterator, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_dist.engine.comms.channel import (
    ChannelClosedError,
    Inbox,
    PeerLostError,
    Receiver,
    Sender,
    TensorInfo,
)
from lightning_dist.engine.comms.in_flight import CAUSE_SECONDS, CLOSE_SECONDS, HostOutbox
from lightning_dist.engine.tensors.tree import flatten, pickle_skeleton, unflatten

Memory = npt.NDArray[np.uint8]  # a run of bytes that can be written to

_HEADER = struct.Struct("<2q")
# Each tensor begins at a multiple of this: a cache line, and a multiple of any number's size.
_ALIGNMENT = 64


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


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class DistributedSender(Sender):
    """Sends copies of trees to one global rank over a gloo process group; needs no keys."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group: dist.ProcessGroup | None = group
        self._peer = peer
        # The schema that the receiver knows, and the layout for which it has posted a receive.
        self._schema, self._layout = pickle_skeleton((None, [])), PacketLayout()
        self._outbox = HostOutbox(peer)

    @override
    def send(self, tree: Any, *, tag: int = 0, key: Hashable = None) -> None:
        tensors, skeleton = flatten(tree)
        infos = [TensorInfo.of(tensor) for tensor in tensors]
        schema = pickle_skeleton((skeleton, infos))
        parts: list[Tensor] = []
        try:
            if schema != self._schema:
                announcement = _packed(self._layout, PacketKind.SCHEMA, len(schema))
                parts = [announcement, torch.frombuffer(bytearray(schema), dtype=torch.uint8)]
                self._schema, self._layout = schema, PacketLayout(infos)
            packet = _packed(self._layout, PacketKind.TREE, tag, tensors)
            self._transmit([*parts, packet])
        except (KeyboardInterrupt, SystemExit) as error:
            # It is unknown how much of the message has left, so nothing can follow it, not even a
            # goodbye: gloo ends a process that gets more bytes than it expects.
            self._outbox.fail(error)
            raise

    @override
    def close(self, *, failed: bool = False) -> None:
        if self._group is None:
            return
        with contextlib.suppress(PeerLostError):
            self._transmit([_packed(self._layout, PacketKind.CLOSE)])
        self._outbox.close()
        # Kept in a reference cycle, a group could be freed in a forked process, where gloo would
        # wait for threads that are not there.
        self._group = None

    def _transmit(self, parts: list[Tensor]) -> None:
        self._outbox.check()
        assert self._group is not None, "the channel is closed"
        try:
            works = [dist.isend(part, dst=self._peer, group=self._group) for part in parts]
        except RuntimeError as error:
            raise PeerLostError(f"Rank {self._peer} cannot be reached: {error}") from error
        self._outbox.keep([work for work in works if work is not None], parts)


def _packed(
    layout: PacketLayout, kind: PacketKind, value: int = 0, tensors: Sequence[Tensor] = ()
) -> Tensor:
    """Copies tensors and a header into a new packet."""
    packet = torch.empty(layout.num_bytes, dtype=torch.uint8)
    memory: Memory = packet.numpy()
    _HEADER.pack_into(memory.data, 0, kind, value)
    for place, tensor in zip(layout.tensors(memory), tensors, strict=False):
        place.copy_(tensor.detach())
    return packet


class DistributedReceiver(Receiver):
    """Receives trees from one rank over a gloo process group.

    Tensors that were sent from the host stay there, others come to the device. Times are those of
    :class:`.Inbox`; :meth:`interrupt` brings the cause.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        device: torch.device,
        timeout_seconds: float | None,
        cause_seconds: float = CAUSE_SECONDS,
    ) -> None:
        self._peer = peer
        self._device = device
        self._skeleton: Any = None
        self._layout = PacketLayout()
        self._inbox = Inbox(peer, timeout_seconds, cause_seconds)
        # The group goes with the thread. Kept in a reference cycle, it could be freed in a forked
        # process, where gloo would wait for threads that are not there.
        self._thread = threading.Thread(
            target=self._run, args=(group,), name=f"receive-from-{peer}", daemon=True
        )
        self._thread.start()

    @override
    def receive(self, *, tag: int = 0, key: Hashable = None) -> Any:
        return self._inbox.next(tag)

    @override
    def interrupt(self, error: BaseException) -> None:
        self._inbox.fail(error)

    @override
    def close(self, *, failed: bool = False) -> None:
        self._thread.join(CLOSE_SECONDS)

    def _run(self, group: dist.ProcessGroup) -> None:
        try:
            # Posted before the packet comes, so that its data need not wait for this thread.
            while self._receive_packet(group) is not PacketKind.CLOSE:
                pass
        except Exception as error:  # a waiting thread must learn of it
            self._inbox.fail(error)
        else:
            self._inbox.fail(ChannelClosedError(f"Rank {self._peer} has closed the channel."))

    def _receive_packet(self, group: dist.ProcessGroup) -> PacketKind:
        packet = torch.empty(self._layout.num_bytes, dtype=torch.uint8)
        self._receive_into(packet, group)
        memory: Memory = packet.numpy()
        kind, value = _HEADER.unpack_from(memory.data)
        if kind == PacketKind.TREE:
            tensors = [
                (host if info.is_on_host else host.to(self._device)).requires_grad_(
                    info.requires_grad
                )
                for info, host in zip(self._layout.infos, self._layout.tensors(memory), strict=True)
            ]
            self._inbox.put(unflatten(tensors, self._skeleton), value)
        elif kind == PacketKind.SCHEMA:
            schema = torch.zeros(value, dtype=torch.uint8)
            self._receive_into(schema, group)
            self._skeleton, infos = pickle.loads(schema.numpy().tobytes())
            self._layout = PacketLayout(infos)
        return PacketKind(kind)

    def _receive_into(self, memory: Tensor, group: dist.ProcessGroup) -> None:
        try:
            work = dist.irecv(memory, src=self._peer, group=group)
            assert work is not None
            work.wait()
        except RuntimeError as error:
            lost = f"The connection to rank {self._peer} broke: {error}"
            raise PeerLostError(lost) from error
