"""The protocols of both ends of a channel between two stages, on any transport.

A message is a tree of tensors with a tag. Stages on one rank share its channels, and only the tag
says which stage a message is for. Its *key* is what both ends know of its shapes beforehand. A
thread that learns that the other end is gone, or that the run has failed, wakes the receiver with
:meth:`Receiver.interrupt`. :class:`MemoryChannel` is a channel inside one process, between stages
of one rank or between ranks that are threads of a test.
"""

from __future__ import annotations

import contextlib
import math
import queue
from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dist.engine.tensors.tree import flatten, unflatten


class PeerLostError(RuntimeError):
    """The process at the other end of a channel is gone."""


class ChannelClosedError(PeerLostError):
    """The process at the other end of a channel has closed it."""


class Sender(Protocol):
    """The near end of a channel out of this process."""

    def send(self, tree: Any, *, tag: int = 0, key: Hashable = None) -> None:
        """Sends any tree, with a tag of 63 bits; returns at once.

        The key is what both ends know of the tree's shapes; None if they know nothing.

        Raises:
            PeerLostError: The receiver is gone.
        """

    def close(self, *, failed: bool = False) -> None:
        """Waits until everything has been sent, unless the run has failed; again, does nothing."""


class Receiver(Protocol):
    """The near end of a channel into this process."""

    def receive(self, *, tag: int = 0, key: Hashable = None) -> Any:
        """Waits for the next tree with a tag, whose tensors require grad as the sent ones did.

        Raises:
            PeerLostError: The sender is gone.
            TimeoutError: Nothing came in time.
        """

    def interrupt(self, error: BaseException) -> None:
        """Raises an error in the present and each later :meth:`receive`."""

    def close(self, *, failed: bool = False) -> None:
        """Waits until the far end has closed the channel, unless the run has failed."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's properties without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_on_host: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorInfo:
        """Creates the info of a tensor."""
        is_on_host = tensor.device.type == "cpu"
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, is_on_host)

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


class Inbox:
    """What has come from a sender, by tag, for the thread that waits for it.

    Args:
        peer: Global rank of the sender.
        timeout_seconds: How long :meth:`next` waits; None waits for ever.
        cause_seconds: How long :meth:`next` waits for the cause when the sender is gone.
    """

    def __init__(
        self, peer: int = 0, timeout_seconds: float | None = None, cause_seconds: float = 0.0
    ) -> None:
        self._peer = peer
        self._timeout_seconds = timeout_seconds
        self._cause_seconds = cause_seconds
        self._come: queue.SimpleQueue[tuple[int, Any] | BaseException] = queue.SimpleQueue()
        self._waiting: defaultdict[int, deque[Any]] = defaultdict(deque)
        self._failure: BaseException | None = None

    def put(self, item: Any, tag: int = 0) -> None:
        """Adds an item; called on any thread."""
        self._come.put((tag, item))

    def fail(self, error: BaseException) -> None:
        """Lets the present and each later :meth:`next` raise an error, behind the earlier items."""
        self._come.put(error)

    def next(self, tag: int = 0) -> Any:
        """Waits for the next item with a tag, and keeps items with other tags for later.

        Raises:
            PeerLostError: The sender is gone.
            TimeoutError: Nothing came in time.
        """
        while not self._waiting[tag]:
            of, item = self._take()
            self._waiting[of].append(item)
        found = self._waiting[tag].popleft()
        if not self._waiting[tag]:
            del self._waiting[tag]
        return found

    def _take(self) -> tuple[int, Any]:
        if self._failure is not None:
            raise self._failure
        try:
            item = self._come.get(timeout=self._timeout_seconds)
        except queue.Empty:
            raise TimeoutError(
                f"Nothing came from rank {self._peer} for timeout_s={self._timeout_seconds:g}"
                " seconds. Raise `timeout_s` if a step may take longer than that. Else look for"
                " code in a step or a hook that only some ranks run, and that waits for others: a"
                " collective, or a call of the model."
            ) from None
        if not isinstance(item, BaseException):
            return item
        self._failure = item
        if isinstance(item, PeerLostError):  # another error tells the cause
            with contextlib.suppress(queue.Empty):
                later = self._come.get(timeout=self._cause_seconds)
                if isinstance(later, BaseException):
                    self._failure = later
        raise self._failure


class MemoryChannel(Sender, Receiver):
    """Both ends of a channel; sent tensors are detached."""

    def __init__(self) -> None:
        self._inbox = Inbox()

    @override
    def send(self, tree: Any, *, tag: int = 0, key: Hashable = None) -> None:
        tensors, skeleton = flatten(tree)
        cut = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        self._inbox.put(unflatten(cut, skeleton), tag)

    @override
    def receive(self, *, tag: int = 0, key: Hashable = None) -> Any:
        return self._inbox.next(tag)

    @override
    def interrupt(self, error: BaseException) -> None:
        self._inbox.fail(error)

    @override
    def close(self, *, failed: bool = False) -> None:
        """Does nothing, since there is no thread to end."""
