"""Point-to-point transport of trees of tensors between stages.

Three decisions:

*Shapes travel with the data.* A transport that fixes its shapes from the first micro-batch gives
silently wrong gradients for uneven ones. Here each message may differ from the one before. A header
with skeleton, shapes, dtypes and ``requires_grad`` goes ahead when it has changed; when not, a
message is one :mod:`packet <lightning_dist.pipeline.packet>`.

*Nobody waits who has work.* A send is begun and left to itself. At the other end a thread has the
receive of the next packet posted before it is sent, so that data flows while the stage computes.

*One communicator per direction.* Two ranks that send to each other on one communicator depend on
the order of their calls; on two they cannot deadlock.

Channels run over gloo, for gloo alone takes CPU tensors and several ranks on one GPU. Tensors of a
GPU are staged through pinned host memory.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.pipeline.buffers import BufferPool
from lightning_dist.pipeline.channel import (
    ChannelClosedError,
    Failed,
    Inbox,
    Message,
    PeerLostError,
)
from lightning_dist.pipeline.packet import (
    Lead,
    PacketLayout,
    TensorInfo,
    as_bytes,
    read_lead,
    write_lead,
)
from lightning_dist.tree import flatten, unflatten

# A thread that outlives this has a peer that died without closing its connection.
_CLOSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Closed:
    """Tells a thread that its channel has ended."""


# Notices in a packet's lead. Any other is the length of a header that comes behind a packet of the
# old kind, for which a receive was posted already; what it announces comes behind that.
_SAME_HEADER, _CLOSE = 0, -1


class DistributedSender:
    """Sends trees to one rank over a gloo process group.

    Args:
        group: The communicator of this direction.
        peer: Global rank of the receiver.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group = group
        self._peer = peer
        self._header = b""
        self._layout = PacketLayout()
        # A tensor must live until it is sent. Whether it is, only a wait can tell, so a thread of
        # its own waits; the sending itself begins in `send`, where no thread has to wake up first.
        self._pending: queue.SimpleQueue[tuple[list[dist.Work], list[Tensor]] | _Closed] = (
            queue.SimpleQueue()
        )
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._reap, name=f"send-to-{peer}", daemon=True)
        self._thread.start()

    def send(self, tree: Any, *, port: int = 0, stamp: int = 0) -> None:
        """Hands a tree over; returns at once.

        Args:
            tree: Any tree. Its tensors must not be written to afterwards.
            port: Any integer of 63 bits, for the receiver to sort by.
            stamp: Any integer of 63 bits, for the receiver to compare.

        Raises:
            PeerLostError: The receiver is gone.
        """
        try:
            self._send(tree, port, stamp)
        except (KeyboardInterrupt, SystemExit) as error:
            # Nobody knows how much of the message has left, so nothing can follow it, not even a
            # goodbye: gloo ends a process that gets more bytes than it expects.
            self._failure = error
            raise

    def _send(self, tree: Any, port: int, stamp: int) -> None:
        tensors, skeleton = flatten(tree)
        infos = [TensorInfo(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]
        header = pickle.dumps((skeleton, infos))
        announcement: list[Tensor] = []
        if header != self._header:
            announcement = self._announcement_of(header)
            self._header, self._layout = header, PacketLayout(infos)
        packet = _packed(self._layout, tensors, Lead(_SAME_HEADER, port, stamp))
        self._transmit([*announcement, packet])

    def _announcement_of(self, header: bytes) -> list[Tensor]:
        lead = _packed(self._layout, [], Lead(len(header)))
        return [lead, torch.frombuffer(bytearray(header), dtype=torch.uint8)]

    def close(self) -> None:
        """Waits until everything has been handed over, and ends the channel."""
        with contextlib.suppress(PeerLostError):
            self._transmit([_packed(self._layout, [], Lead(_CLOSE))])
        self._pending.put(_Closed())
        self._thread.join(_CLOSE_SECONDS)

    def _transmit(self, parts: list[Tensor]) -> None:
        if self._failure is not None:
            raise PeerLostError(f"Rank {self._peer} cannot be reached.") from self._failure
        try:
            works = [dist.isend(part, dst=self._peer, group=self._group) for part in parts]
        except RuntimeError as error:
            raise PeerLostError(f"Rank {self._peer} cannot be reached: {error}") from error
        self._pending.put(([work for work in works if work is not None], parts))

    def _reap(self) -> None:
        try:
            while not isinstance(message := self._pending.get(), _Closed):
                for work in message[0]:
                    work.wait()
                del message  # else the last activation stays alive until the next one
        except RuntimeError as error:
            self._failure = error


class DistributedReceiver:
    """Receives trees from one rank over a gloo process group.

    Args:
        group: The communicator of this direction.
        peer: Global rank of the sender.
        device: Where the received tensors shall be.
        timeout_seconds: How long :meth:`receive` waits; None waits for ever.
        cause_seconds: How long it waits for :meth:`interrupt` to say why the sender is gone.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        device: torch.device,
        timeout_seconds: float | None,
        cause_seconds: float = 2.0,
    ) -> None:
        self._cause_seconds = cause_seconds
        self._group = group
        self._peer = peer
        self._device = device
        self._timeout_seconds = timeout_seconds
        self._pool = BufferPool()
        self._arrived: queue.SimpleQueue[Message | _Closed | Failed] = queue.SimpleQueue()
        self._inbox = Inbox(self._next)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"receive-from-{peer}", daemon=True)
        self._thread.start()

    def receive(self, *, port: int = 0, stamp: int = 0) -> Any:
        """Waits for the next tree of a port.

        Args:
            port: What the tree has been sent to.
            stamp: What the tree must have been sent with.

        Returns:
            The tree, on this receiver's device; its tensors require grad as the sent ones did.

        Raises:
            PeerLostError: The sender is gone.
            StampError: The tree was sent with another stamp.
            TimeoutError: Nothing came in time.
        """
        return self._inbox.next(port).opened(stamp)

    def _next(self) -> Message:
        if self._failure is not None:
            raise self._failure
        try:
            message = self._arrived.get(timeout=self._timeout_seconds)
        except queue.Empty:
            raise TimeoutError(
                f"Nothing came from rank {self._peer} for timeout_s={self._timeout_seconds:g}"
                " seconds. Raise `timeout_s` if a step may take longer than that."
            ) from None
        if isinstance(message, Message):
            return message
        self._failure = self._cause_of(message)
        raise self._failure

    def _cause_of(self, message: _Closed | Failed) -> BaseException:
        """Prefers the reason that :meth:`interrupt` brings to the silence that it caused."""
        error = message.error if isinstance(message, Failed) else None
        if error is None or isinstance(error, PeerLostError):
            with contextlib.suppress(queue.Empty):
                later = self._arrived.get(timeout=self._cause_seconds)
                if isinstance(later, Failed):
                    return later.error
        return error or ChannelClosedError(f"Rank {self._peer} has closed the channel.")

    def interrupt(self, error: BaseException) -> None:
        """Makes this and each later :meth:`receive` raise.

        Args:
            error: What to raise.
        """
        self._arrived.put(Failed(error))

    def close(self) -> None:
        """Waits until the far end has closed the channel."""
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        skeleton: Any = None
        layout = PacketLayout()
        try:
            while True:
                # Posted before the packet comes: its data need not wait for this thread.
                memory = self._receive_packet(layout)
                lead = read_lead(memory)
                if lead.notice == _CLOSE:
                    break
                if lead.notice != _SAME_HEADER:
                    skeleton, infos = self._receive_header(lead.notice)
                    layout = PacketLayout(infos)
                    memory = self._receive_packet(layout)
                    lead = read_lead(memory)
                tree = self._assemble(skeleton, layout, memory)
                self._arrived.put(Message(tree, lead.port, lead.stamp))
                del memory, tree  # else the last activation stays alive until the next one
            self._arrived.put(_Closed())
        except Exception as error:  # whoever waits must learn of it
            self._arrived.put(Failed(error))

    def _receive_packet(self, layout: PacketLayout) -> bytearray:
        memory = self._pool.take(layout.num_bytes)
        self._receive_into(as_bytes(memory))
        return memory

    def _receive_header(self, length: int) -> tuple[Any, list[TensorInfo]]:
        header = torch.zeros(length, dtype=torch.uint8)
        self._receive_into(header)
        loaded: tuple[Any, list[TensorInfo]] = pickle.loads(header.numpy().tobytes())
        return loaded

    def _receive_into(self, memory: Tensor) -> None:
        with self._losing_peer():
            work = dist.irecv(memory, src=self._peer, group=self._group)
            assert work is not None
            work.wait()

    @contextlib.contextmanager
    def _losing_peer(self) -> Iterator[None]:
        """Tells what gloo raises from what this rank cannot do with a message."""
        try:
            yield
        except RuntimeError as error:
            lost = f"The connection to rank {self._peer} broke: {error}"
            raise PeerLostError(lost) from error

    def _assemble(self, skeleton: Any, layout: PacketLayout, memory: bytearray) -> Any:
        tensors = [
            host.to(self._device).requires_grad_(info.requires_grad)
            for info, host in zip(layout.infos, layout.tensors(memory), strict=True)
        ]
        return unflatten(tensors, skeleton)


def _packed(layout: PacketLayout, tensors: Sequence[Tensor], lead: Lead) -> Tensor:
    """Copies tensors and a lead into a new packet.

    Args:
        layout: Of the packet.
        tensors: What it has room for; none leave the room as it is.
        lead: What it begins with.
    """
    is_pinned = any(tensor.device.type != "cpu" for tensor in tensors)
    packet = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
    memory = packet.numpy().data
    write_lead(memory, lead)
    for place, tensor in zip(layout.tensors(memory), tensors, strict=False):
        place.copy_(tensor.detach())
    return packet
