"""Point-to-point transport of trees of tensors between stages.

Three decisions:

*Shapes travel with the data.* A transport that fixes its shapes from the first micro-batch gives
silently wrong gradients for uneven ones. Here each message may differ from the one before. A header
with skeleton, shapes, dtypes and ``requires_grad`` goes ahead when it has changed; when not, a
message costs one extra integer.

*Nobody waits who has work.* A send is begun and left to itself. At the other end a thread has the
receives of the next message posted before it is sent, so that data flows while the stage computes,
and a message takes one way over the wire and not three.

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
from collections.abc import Iterator
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
from lightning_dist.tree import flatten, unflatten

# A thread that outlives this has a peer that died without closing its connection.
_CLOSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Closed:
    """Tells a thread that its channel has ended."""


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


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
        self._infos: list[_TensorInfo] = []
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
        infos = [_TensorInfo(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]
        header = pickle.dumps((skeleton, infos))
        parts = [_stage_to_host(t.detach()) for t in tensors]
        if header == self._header:
            self._transmit([torch.tensor([_SAME_HEADER, port, stamp]), *parts])
            return
        announced = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        lead = torch.tensor([len(header), port, stamp])
        self._transmit([lead, *self._fillers(), announced, *parts])
        self._header, self._infos = header, infos

    def close(self) -> None:
        """Waits until everything has been handed over, and ends the channel."""
        with contextlib.suppress(PeerLostError):
            self._transmit([torch.tensor([_CLOSE, 0, 0]), *self._fillers()])
        self._pending.put(_Closed())
        self._thread.join(_CLOSE_SECONDS)

    def _fillers(self) -> list[Tensor]:
        """Makes something for the receives that were posted for one more message as the last."""
        return [torch.empty(info.shape, dtype=info.dtype) for info in self._infos]

    def _transmit(self, parts: list[Tensor]) -> None:
        if self._failure is not None:
            raise PeerLostError(f"Rank {self._peer} cannot be reached.") from self._failure
        sent = [part for part in parts if part.numel() > 0]
        try:
            works = [dist.isend(part, dst=self._peer, group=self._group) for part in sent]
        except RuntimeError as error:
            raise PeerLostError(f"Rank {self._peer} cannot be reached: {error}") from error
        self._pending.put(([work for work in works if work is not None], sent))

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
        infos: list[_TensorInfo] = []
        try:
            while True:
                # All receives of a message like the last one are posted before it comes, so that
                # its data need not wait for this thread; see `DistributedSender._fillers`.
                lead, hosts = torch.zeros(3, dtype=torch.int64), self._take(infos)
                self._wait(self._post(lead), self._post(*hosts))
                length, port, stamp = lead.tolist()
                if length == _CLOSE:
                    break
                if length != _SAME_HEADER:
                    skeleton, infos = self._receive_header(length)
                    hosts = self._take(infos)
                    self._wait(self._post(*hosts))
                self._arrived.put(Message(self._assemble(skeleton, infos, hosts), port, stamp))
                del hosts  # else the last activation stays alive until the next one
            self._arrived.put(_Closed())
        except Exception as error:  # whoever waits must learn of it
            self._arrived.put(Failed(error))

    def _take(self, infos: list[_TensorInfo]) -> list[Tensor]:
        return [self._pool.take(info.shape, info.dtype) for info in infos]

    def _post(self, *parts: Tensor) -> list[dist.Work | None]:
        with self._losing_peer():
            return [
                dist.irecv(part, src=self._peer, group=self._group)
                for part in parts
                if part.numel()
            ]

    def _wait(self, *posted: list[dist.Work | None]) -> None:
        with self._losing_peer():
            for works in posted:
                for work in works:
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

    def _receive_header(self, length: int) -> tuple[Any, list[_TensorInfo]]:
        header = torch.zeros(length, dtype=torch.uint8)
        self._wait(self._post(header))
        loaded: tuple[Any, list[_TensorInfo]] = pickle.loads(header.numpy().tobytes())
        return loaded

    def _assemble(self, skeleton: Any, infos: list[_TensorInfo], hosts: list[Tensor]) -> Any:
        tensors = [
            host.to(self._device).requires_grad_(info.requires_grad)
            for host, info in zip(hosts, infos, strict=True)
        ]
        return unflatten(tensors, skeleton)


def _stage_to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor.contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor)
