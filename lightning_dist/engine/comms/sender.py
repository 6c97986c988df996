"""The near end of a channel to another process.

*No thread with work waits.* A send is begun and left to itself.

*One communicator per direction.* Two ranks that send to each other on one communicator depend on
the order of their calls; on two they cannot deadlock.

Channels run over gloo, for gloo alone takes CPU tensors and several ranks on one GPU. Tensors of a
GPU are staged through pinned host memory.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.engine.comms.channel import PeerLostError
from lightning_dist.engine.comms.codec import NO_SCHEMA, schema_of
from lightning_dist.engine.comms.packet import (
    Memory,
    PacketHeader,
    PacketKind,
    PacketLayout,
    TensorInfo,
    fill,
    write_header,
)
from lightning_dist.engine.tensors.tree import flatten

# A thread that outlives this has a peer that died without closing its connection.
_CLOSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Closed:
    """The last entry of the thread's queue, after the channel's end."""


class DistributedSender:
    """Sends trees to one rank over a gloo process group.

    Args:
        group: The communicator of this direction.
        peer: Global rank of the receiver.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group: dist.ProcessGroup | None = group
        self._peer = peer
        # The schema that the receiver knows, and the layout for which it has posted a receive.
        self._schema, self._layout = NO_SCHEMA, PacketLayout()
        # A tensor must live until it is sent. Only a wait can tell whether it is, so a separate
        # thread waits. The sending itself begins in `send`, where no thread has to wake up first.
        self._pending: queue.SimpleQueue[tuple[list[dist.Work], list[Tensor]] | _Closed] = (
            queue.SimpleQueue()
        )
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._reap, name=f"send-to-{peer}", daemon=True)
        self._thread.start()

    def send(self, tree: Any, *, tag: int = 0) -> None:
        """Sends a tree; returns at once.

        Args:
            tree: Any tree; its tensors may be written to afterwards.
            tag: Tag of the tree, any integer of 63 bits.

        Raises:
            PeerLostError: The receiver is gone.
        """
        try:
            self._send(tree, tag)
        except (KeyboardInterrupt, SystemExit) as error:
            # It is unknown how much of the message has left, so nothing can follow it, not even a
            # goodbye: gloo ends a process that gets more bytes than it expects.
            self._failure = error
            raise

    def _send(self, tree: Any, tag: int) -> None:
        self._refuse_after_failure()
        tensors, skeleton = flatten(tree)
        infos = [TensorInfo.of(tensor) for tensor in tensors]
        schema = schema_of(skeleton, infos)
        parts: list[Tensor] = []
        if schema != self._schema:
            header = PacketHeader(PacketKind.SCHEMA, len(schema))
            announcement = _packed(self._layout, [], header)
            parts = [announcement, torch.frombuffer(bytearray(schema), dtype=torch.uint8)]
            self._schema, self._layout = schema, PacketLayout(infos)
        packet = _packed(self._layout, tensors, PacketHeader(PacketKind.TREE, tag=tag))
        self._transmit([*parts, packet])

    def close(self) -> None:
        """Waits until everything has been sent, and closes the channel; again, does nothing."""
        if self._group is None:
            return
        with contextlib.suppress(PeerLostError):
            self._transmit([_packed(self._layout, [], PacketHeader(PacketKind.CLOSE))])
        self._pending.put(_Closed())
        self._thread.join(_CLOSE_SECONDS)
        # Kept in a reference cycle, a group could be freed in a forked process, where gloo would
        # wait for threads that are not there.
        self._group = None

    def _transmit(self, parts: list[Tensor]) -> None:
        self._refuse_after_failure()
        assert self._group is not None, "the channel is closed"
        try:
            works = [dist.isend(part, dst=self._peer, group=self._group) for part in parts]
        except RuntimeError as error:
            raise PeerLostError(f"Rank {self._peer} cannot be reached: {error}") from error
        self._pending.put(([work for work in works if work is not None], parts))

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise PeerLostError(f"Rank {self._peer} cannot be reached.") from self._failure

    def _reap(self) -> None:
        try:
            while not isinstance(message := self._pending.get(), _Closed):
                for work in message[0]:
                    work.wait()
                del message  # else the last activation stays alive until the next one
        except RuntimeError as error:
            self._failure = error


def _packed(layout: PacketLayout, tensors: Sequence[Tensor], header: PacketHeader) -> Tensor:
    """Copies tensors and a header into a new packet.

    Args:
        layout: Layout of the packet.
        tensors: Tensors of the layout; if empty, the packet holds the header only.
        header: The header.
    """
    is_pinned = any(tensor.device.type != "cpu" for tensor in tensors)
    packet = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
    memory: Memory = packet.numpy()
    write_header(memory, header)
    fill(layout, memory, tensors)
    return packet
