"""Point-to-point transport of trees of tensors between stages.

Three decisions:

*Shapes travel with the data.* A transport that fixes its shapes from the first micro-batch gives
silently wrong gradients for uneven ones. Here each message may differ from the one before. A header
with skeleton, shapes, dtypes and ``requires_grad`` goes ahead when it has changed; when not, a
message costs one extra integer.

*Nobody waits who has work.* Each channel has one direction and a thread at each end. The sending
thread takes messages from a queue, so the compute never waits for the network; the receiving thread
always has a receive posted, so data flows while the stage computes the micro-batch before.

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
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.pipeline.buffers import BufferPool
from lightning_dist.tree import flatten, unflatten

# A thread that outlives this has a peer that died without closing its connection.
_CLOSE_SECONDS = 10.0


class PeerLostError(RuntimeError):
    """The process at the other end of a channel is gone."""


class ChannelClosedError(PeerLostError):
    """The process at the other end of a channel has closed it."""


class Sender(Protocol):
    """The near end of a channel out of this process."""

    def send(self, tree: Any) -> None:
        """Hands a tree over; returns at once."""

    def close(self) -> None:
        """Waits until everything has been handed over, and ends the channel."""


class Receiver(Protocol):
    """The near end of a channel into this process."""

    def receive(self) -> Any:
        """Waits for the next tree."""

    def interrupt(self, error: BaseException) -> None:
        """Makes this and each later :meth:`receive` raise."""

    def close(self) -> None:
        """Waits until the far end has closed the channel."""


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class _Closed:
    """Tells a thread that its channel has ended."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """Tells the reader of a queue why nothing more will come."""

    error: BaseException


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
        self._outbox: queue.SimpleQueue[tuple[list[Tensor], bytes] | _Closed] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"send-to-{peer}", daemon=True)
        self._thread.start()

    def send(self, tree: Any) -> None:
        """Hands a tree over; returns at once.

        Args:
            tree: Any tree. Its tensors must not be written to afterwards.

        Raises:
            PeerLostError: An earlier message could not be sent.
        """
        if self._failure is not None:
            raise PeerLostError(f"Rank {self._peer} cannot be reached.") from self._failure
        tensors, skeleton = flatten(tree)
        infos = [_TensorInfo(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]
        header = pickle.dumps((skeleton, infos))
        staged = [_stage_to_host(t.detach()) for t in tensors]
        self._outbox.put((staged, header))

    def close(self) -> None:
        """Waits until everything has been handed over, and ends the channel."""
        self._outbox.put(_Closed())
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            while not isinstance(message := self._outbox.get(), _Closed):
                self._transmit(*message)
                del message  # else the last activation stays alive until the next one
            self._transmit_parts([torch.tensor([_CLOSE])])
        except RuntimeError as error:
            self._failure = error

    def _transmit(self, tensors: list[Tensor], header: bytes) -> None:
        parts = [t for t in tensors if t.numel() > 0]
        if header == self._header:
            self._transmit_parts([torch.tensor([_SAME_HEADER]), *parts])
            return
        self._header = header
        header_bytes = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._transmit_parts([torch.tensor([len(header)]), header_bytes, *parts])

    def _transmit_parts(self, parts: list[Tensor]) -> None:
        works = [dist.isend(part, dst=self._peer, group=self._group) for part in parts]
        for work in works:
            assert work is not None
            work.wait()


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
        self._inbox: queue.SimpleQueue[tuple[Any] | _Closed | _Failed] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"receive-from-{peer}", daemon=True)
        self._thread.start()

    def receive(self) -> Any:
        """Waits for the next tree.

        Returns:
            The tree, on this receiver's device; its tensors require grad as the sent ones did.

        Raises:
            PeerLostError: The sender is gone.
            TimeoutError: Nothing came in time.
        """
        if self._failure is not None:
            raise self._failure
        try:
            message = self._inbox.get(timeout=self._timeout_seconds)
        except queue.Empty:
            raise TimeoutError(
                f"Nothing came from rank {self._peer} for timeout_s={self._timeout_seconds:g}"
                " seconds. Raise `timeout_s` if a step may take longer than that."
            ) from None
        if isinstance(message, tuple):
            return message[0]
        self._failure = self._cause_of(message)
        raise self._failure

    def _cause_of(self, message: _Closed | _Failed) -> BaseException:
        """Prefers the reason that :meth:`interrupt` brings to the silence that it caused."""
        error = message.error if isinstance(message, _Failed) else None
        if error is None or isinstance(error, PeerLostError):
            with contextlib.suppress(queue.Empty):
                later = self._inbox.get(timeout=self._cause_seconds)
                if isinstance(later, _Failed):
                    return later.error
        return error or ChannelClosedError(f"Rank {self._peer} has closed the channel.")

    def interrupt(self, error: BaseException) -> None:
        """Makes this and each later :meth:`receive` raise.

        Args:
            error: What to raise.
        """
        self._inbox.put(_Failed(error))

    def close(self) -> None:
        """Waits until the far end has closed the channel."""
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        header: tuple[Any, list[_TensorInfo]] | None = None
        try:
            while (length := self._receive_length()) != _CLOSE:
                if length != _SAME_HEADER:
                    header = self._receive_header(length)
                assert header is not None
                self._inbox.put((self._receive_tree(*header),))
            self._inbox.put(_Closed())
        except RuntimeError as error:
            lost = PeerLostError(f"The connection to rank {self._peer} broke: {error}")
            self._inbox.put(_Failed(lost))

    def _receive_length(self) -> int:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, src=self._peer, group=self._group)
        return int(length)

    def _receive_header(self, length: int) -> tuple[Any, list[_TensorInfo]]:
        header = torch.zeros(length, dtype=torch.uint8)
        dist.recv(header, src=self._peer, group=self._group)
        loaded: tuple[Any, list[_TensorInfo]] = pickle.loads(header.numpy().tobytes())
        return loaded

    def _receive_tree(self, skeleton: Any, infos: list[_TensorInfo]) -> Any:
        hosts = [self._pool.take(info.shape, info.dtype) for info in infos]
        works = [
            dist.irecv(host, src=self._peer, group=self._group) for host in hosts if host.numel()
        ]
        for work in works:
            assert work is not None
            work.wait()
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


class MemoryChannel:
    """Both ends of a channel inside one process, for tests and for one-process pipelines."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(self, tree: Any) -> None:
        """Hands a tree over, its tensors cut from their graph."""
        tensors, skeleton = flatten(tree)
        cut = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        self._messages.put(unflatten(cut, skeleton))

    def receive(self) -> Any:
        """Waits for the next tree."""
        message = self._messages.get()
        if isinstance(message, _Failed):
            raise message.error
        return message

    def interrupt(self, error: BaseException) -> None:
        """Makes the next :meth:`receive` raise."""
        self._messages.put(_Failed(error))

    def close(self) -> None:
        """Does nothing: there is no thread to end."""
