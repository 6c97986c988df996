"""The near end of a channel from another process.

A thread receives packets from the socket. The thread posts the receive of the next packet before
that packet is sent, so that data flows while the stage computes. A packet in shared memory waits
there until the stage calls :meth:`DistributedReceiver.receive`. Messages carry numbers, since a
message in shared memory may overtake one on the socket, and vice versa.

:class:`Arrivals` joins two ways: the queue of the network thread, and shared memory.

A thread that receives waits at one place. Without shared memory that is the queue. With shared
memory it is a semaphore to which both ways add. The switch to the semaphore comes through the queue
itself, so that no earlier item is missed.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.engine.comms.channel import (
    ChannelClosedError,
    Failed,
    Inbox,
    Message,
    PeerLostError,
)
from lightning_dist.engine.comms.codec import NO_FORM, MessageSchema, TreeReader
from lightning_dist.engine.comms.packet import Memory, PacketHeader, PacketKind, as_bytes, read_lead
from lightning_dist.engine.comms.shared_ring import AcceptedRing
from lightning_dist.engine.comms.shared_slots import read_shared

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class _Attached:
    """An entry of the queue from which on items may come through shared memory."""

    ring: AcceptedRing


class Arrivals(Generic[Item]):
    """Items from the queue and from shared memory, in the order of each.

    Args:
        read: Creates an item from a packet in shared memory, which is reused after the call.
    """

    def __init__(self, read: Callable[[Memory], Item]) -> None:
        self._read = read
        self._queue: queue.SimpleQueue[Item | _Attached] = queue.SimpleQueue()
        self._ring: AcceptedRing | None = None
        # The ring that threads with items for the queue must wake, and the lock between them.
        self._attached: AcceptedRing | None = None
        self._lock = threading.Lock()

    def put(self, item: Item) -> None:
        """Adds an item; from any thread.

        Args:
            item: The item that has arrived.
        """
        with self._lock:
            self._put(item)

    def attach(self, ring: AcceptedRing) -> None:
        """Adds shared memory as a way for items; from any thread.

        Args:
            ring: Replaces an earlier ring, through which no more items come.
        """
        with self._lock:
            self._put(_Attached(ring))
            self._attached = ring

    def take(self, timeout_seconds: float | None) -> Item:
        """Waits for the next item; from one thread only.

        Args:
            timeout_seconds: How long; None waits for ever.

        Raises:
            queue.Empty: No item came in time.
        """
        while isinstance(item := self._take_any(timeout_seconds), _Attached):
            self._ring = item.ring
        return item

    def _put(self, item: Item | _Attached) -> None:
        self._queue.put(item)
        if self._attached is not None:
            self._attached.arrived.post()

    def _take_any(self, timeout_seconds: float | None) -> Item | _Attached:
        ring = self._ring
        if ring is None:
            return self._queue.get(timeout=timeout_seconds)
        if not ring.arrived.wait(timeout_seconds):
            raise queue.Empty
        # Packets first: they were sent before their sender closed the channel, or died.
        if (packet := ring.take()) is None:
            return self._queue.get_nowait()
        try:
            return self._read(packet)
        finally:
            ring.release()


# A thread that outlives this has a peer that died without closing its connection.
_CLOSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Numbered:
    """A message with its number.

    Attributes:
        number: Number of messages that the sender sent before.
        message: The message; None if the sender closed the channel.
    """

    number: int
    message: Message | None


class DistributedReceiver:
    """Receives trees from one rank over a gloo process group.

    Args:
        group: The communicator of this direction.
        peer: Global rank of the sender.
        device: Device of the received tensors.
        timeout_seconds: How long :meth:`receive` waits; None waits for ever.
        cause_seconds: How long :meth:`receive` waits for :meth:`interrupt` to bring the cause when
            the sender is gone.
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
        self._timeout_seconds = timeout_seconds
        self._form = NO_FORM
        # One reader for the socket and one for shared memory, since different threads use them.
        self._by_socket, self._by_memory = TreeReader(device), TreeReader(device)
        self._arrivals = Arrivals[_Numbered | Failed](self._read_shared)
        self._early: dict[int, _Numbered] = {}
        self._number = 0
        self._inbox = Inbox(self._next)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"receive-from-{peer}", daemon=True)
        self._thread.start()

    def receive(self, *, port: int = 0) -> Any:
        """Waits for the next tree with a tag.

        Args:
            port: Tag of the tree.

        Returns:
            The tree, on this receiver's device; its tensors require grad as the sent ones did.

        Raises:
            PeerLostError: The sender is gone.
            TimeoutError: Nothing came in time.
        """
        return self._inbox.next(port).tree

    def _next(self) -> Message:
        if self._failure is not None:
            raise self._failure
        item = self._in_order()
        if isinstance(item, _Numbered) and item.message is not None:
            return item.message
        self._failure = self._cause_of(item)
        raise self._failure

    def _in_order(self) -> _Numbered | Failed:
        while (item := self._early.pop(self._number, None)) is None:
            arrived = self._take()
            if isinstance(arrived, Failed):
                return arrived
            self._early[arrived.number] = arrived
        self._number += 1
        return item

    def _take(self) -> _Numbered | Failed:
        try:
            return self._arrivals.take(self._timeout_seconds)
        except queue.Empty:
            raise TimeoutError(
                f"Nothing came from rank {self._peer} for timeout_s={self._timeout_seconds:g}"
                " seconds. Raise `timeout_s` if a step may take longer than that."
            ) from None

    def _cause_of(self, item: _Numbered | Failed) -> BaseException:
        """Returns the cause of a lost peer: an error from :meth:`interrupt`, if one comes soon."""
        error = item.error if isinstance(item, Failed) else None
        if error is None or isinstance(error, PeerLostError):
            with contextlib.suppress(queue.Empty):
                later = self._arrivals.take(self._cause_seconds)
                if isinstance(later, Failed):
                    return later.error
        return error or ChannelClosedError(f"Rank {self._peer} has closed the channel.")

    def interrupt(self, error: BaseException) -> None:
        """Raises an error in the present and each later :meth:`receive`.

        Args:
            error: What to raise.
        """
        self._arrivals.put(Failed(error))

    def close(self) -> None:
        """Waits until the far end has closed the channel."""
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            # Posted before the packet comes, so that its data need not wait for this thread.
            while (lead := self._receive_packet()).notice is not PacketKind.CLOSE:
                if lead.notice is PacketKind.FORM:
                    self._receive_form(lead.num_bytes)
            self._arrivals.put(_Numbered(lead.number, None))
        except Exception as error:  # a waiting thread must learn of it
            self._arrivals.put(Failed(error))

    def _receive_packet(self) -> PacketHeader:
        memory = self._by_socket.take_memory()
        self._receive_into(as_bytes(memory))
        lead = read_lead(memory)
        if lead.notice is PacketKind.TREE:
            self._arrivals.put(_numbered(lead, self._by_socket.read(memory)))
        return lead

    def _receive_form(self, num_bytes: int) -> None:
        pickled = torch.zeros(num_bytes, dtype=torch.uint8)
        self._receive_into(pickled)
        form: MessageSchema = pickle.loads(pickled.numpy().tobytes())
        self._by_socket.expect(form.content)
        is_new = form.offer != self._form.offer
        self._form = form
        if is_new and form.offer is not None and (ring := AcceptedRing.accept(form.offer)):
            self._arrivals.attach(ring)

    def _read_shared(self, slot: Memory) -> _Numbered | Failed:
        try:
            return _numbered(*read_shared(slot, self._by_memory))
        except Exception as error:  # as on the network thread: each later receive raises it, too
            return Failed(error)

    def _receive_into(self, memory: Tensor) -> None:
        with self._losing_peer():
            work = dist.irecv(memory, src=self._peer, group=self._group)
            assert work is not None
            work.wait()

    @contextlib.contextmanager
    def _losing_peer(self) -> Iterator[None]:
        """Turns gloo's errors into :class:`.PeerLostError`, apart from errors in a message."""
        try:
            yield
        except RuntimeError as error:
            lost = f"The connection to rank {self._peer} broke: {error}"
            raise PeerLostError(lost) from error


def _numbered(lead: PacketHeader, tree: Any) -> _Numbered:
    return _Numbered(lead.number, Message(tree, lead.port))
