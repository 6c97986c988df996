"""The near end of a channel from another process.

What comes by the socket is received by a thread, which has the receive of the next packet posted
before it is sent, so that data flows while the stage computes. What comes through shared memory
waits there until it is asked for. Messages carry numbers, for a message by the one way may overtake
one by the other.

What comes to a receiver by two ways: a queue of its network thread, and shared memory.

Who waits, waits at one place. Without shared memory that is the queue. With it, it is the
semaphore to which both ways add; the change from one to the other comes through the queue itself,
so that nothing is overlooked that came before.
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
    """Tells who takes that there is shared memory from now on."""

    ring: AcceptedRing


class Arrivals(Generic[Item]):
    """Items in the order of each way.

    Args:
        read: Makes an item of a packet in shared memory, which is used again when it returns.
    """

    def __init__(self, read: Callable[[Memory], Item]) -> None:
        self._read = read
        self._queue: queue.SimpleQueue[Item | _Attached] = queue.SimpleQueue()
        self._ring: AcceptedRing | None = None
        # What those who put things into the queue have to wake, and what keeps them apart.
        self._attached: AcceptedRing | None = None
        self._lock = threading.Lock()

    def put(self, item: Item) -> None:
        """Adds an item; from any thread.

        Args:
            item: What has come.
        """
        with self._lock:
            self._put(item)

    def attach(self, ring: AcceptedRing) -> None:
        """Lets items come through shared memory, too; from any thread.

        Args:
            ring: Takes the place of another, through which nothing comes any more.
        """
        with self._lock:
            self._put(_Attached(ring))
            self._attached = ring

    def take(self, timeout_seconds: float | None) -> Item:
        """Waits for the next item; from one thread only.

        Args:
            timeout_seconds: How long; None waits for ever.

        Raises:
            queue.Empty: None came in time.
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
    """What a sender has sent.

    Attributes:
        number: How many messages it sent before.
        message: None where it closed the channel.
    """

    number: int
    message: Message | None


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
        self._timeout_seconds = timeout_seconds
        self._form = NO_FORM
        # One for each way, for they are read by different threads.
        self._by_socket, self._by_memory = TreeReader(device), TreeReader(device)
        self._arrivals = Arrivals[_Numbered | Failed](self._read_shared)
        self._early: dict[int, _Numbered] = {}
        self._number = 0
        self._inbox = Inbox(self._next)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"receive-from-{peer}", daemon=True)
        self._thread.start()

    def receive(self, *, port: int = 0) -> Any:
        """Waits for the next tree of a port.

        Args:
            port: What the tree has been sent to.

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
        """Prefers the reason that :meth:`interrupt` brings to the silence that it caused."""
        error = item.error if isinstance(item, Failed) else None
        if error is None or isinstance(error, PeerLostError):
            with contextlib.suppress(queue.Empty):
                later = self._arrivals.take(self._cause_seconds)
                if isinstance(later, Failed):
                    return later.error
        return error or ChannelClosedError(f"Rank {self._peer} has closed the channel.")

    def interrupt(self, error: BaseException) -> None:
        """Makes this and each later :meth:`receive` raise.

        Args:
            error: What to raise.
        """
        self._arrivals.put(Failed(error))

    def close(self) -> None:
        """Waits until the far end has closed the channel."""
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            # Posted before the packet comes: its data need not wait for this thread.
            while (lead := self._receive_packet()).notice is not PacketKind.CLOSE:
                if lead.notice is PacketKind.FORM:
                    self._receive_form(lead.num_bytes)
            self._arrivals.put(_Numbered(lead.number, None))
        except Exception as error:  # whoever waits must learn of it
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
        except Exception as error:  # as from the thread: each later receive raises it, too
            return Failed(error)

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


def _numbered(lead: PacketHeader, tree: Any) -> _Numbered:
    return _Numbered(lead.number, Message(tree, lead.port))
