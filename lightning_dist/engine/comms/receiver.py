"""The near end of a channel from another process.

A thread receives packets from the socket. The thread posts the receive of the next packet before
that packet is sent, so that data flows while the stage computes.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

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
from lightning_dist.engine.comms.codec import TreeReader
from lightning_dist.engine.comms.packet import PacketHeader, PacketKind, as_bytes, read_header

# A thread that outlives this has a peer that died without closing its connection.
_CLOSE_SECONDS = 10.0


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
        self._peer = peer
        self._timeout_seconds = timeout_seconds
        self._reader = TreeReader(device)
        self._arrived: queue.SimpleQueue[Message | Failed] = queue.SimpleQueue()
        self._inbox = Inbox(self._next)
        self._failure: BaseException | None = None
        # The group goes with the thread. Kept in a reference cycle, it could be freed in a forked
        # process, where gloo would wait for threads that are not there.
        self._thread = threading.Thread(
            target=self._run, args=(group,), name=f"receive-from-{peer}", daemon=True
        )
        self._thread.start()

    def receive(self, *, tag: int = 0) -> Any:
        """Waits for the next tree with a tag.

        Args:
            tag: Tag of the tree.

        Returns:
            The tree, on this receiver's device; its tensors require grad as the sent ones did.

        Raises:
            PeerLostError: The sender is gone.
            TimeoutError: Nothing came in time.
        """
        return self._inbox.next(tag).tree

    def _next(self) -> Message:
        if self._failure is not None:
            raise self._failure
        item = self._take()
        if isinstance(item, Message):
            return item
        self._failure = self._cause_of(item.error)
        raise self._failure

    def _take(self) -> Message | Failed:
        try:
            return self._arrived.get(timeout=self._timeout_seconds)
        except queue.Empty:
            raise TimeoutError(
                f"Nothing came from rank {self._peer} for timeout_s={self._timeout_seconds:g}"
                " seconds. Raise `timeout_s` if a step may take longer than that."
            ) from None

    def _cause_of(self, error: BaseException) -> BaseException:
        """Returns the cause of a lost peer: an error from :meth:`interrupt`, if one comes soon."""
        if isinstance(error, PeerLostError):
            with contextlib.suppress(queue.Empty):
                later = self._arrived.get(timeout=self._cause_seconds)
                if isinstance(later, Failed):
                    return later.error
        return error

    def interrupt(self, error: BaseException) -> None:
        """Raises an error in the present and each later :meth:`receive`."""
        self._arrived.put(Failed(error))

    def close(self) -> None:
        """Waits until the far end has closed the channel."""
        self._thread.join(_CLOSE_SECONDS)

    def _run(self, group: dist.ProcessGroup) -> None:
        try:
            # Posted before the packet comes, so that its data need not wait for this thread.
            while (header := self._receive_packet(group)).kind is not PacketKind.CLOSE:
                if header.kind is PacketKind.SCHEMA:
                    self._receive_schema(group, header.num_bytes)
        except Exception as error:  # a waiting thread must learn of it
            self._arrived.put(Failed(error))
        else:
            closed = ChannelClosedError(f"Rank {self._peer} has closed the channel.")
            self._arrived.put(Failed(closed))

    def _receive_packet(self, group: dist.ProcessGroup) -> PacketHeader:
        memory = self._reader.take_memory()
        self._receive_into(as_bytes(memory), group)
        header = read_header(memory)
        if header.kind is PacketKind.TREE:
            self._arrived.put(Message(self._reader.read(memory), header.tag))
        return header

    def _receive_schema(self, group: dist.ProcessGroup, num_bytes: int) -> None:
        schema = torch.zeros(num_bytes, dtype=torch.uint8)
        self._receive_into(schema, group)
        self._reader.expect(schema.numpy().tobytes())

    def _receive_into(self, memory: Tensor, group: dist.ProcessGroup) -> None:
        with self._losing_peer():
            work = dist.irecv(memory, src=self._peer, group=group)
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
