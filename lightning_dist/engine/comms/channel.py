"""What both ends of a channel between two stages promise, over whatever it runs.

A message is a tree of tensors with a number on whose meaning sender and receiver agree. This
*port* says what waits for it: stages that share a rank share its channels, and nothing else tells
what is for which of them. A thread that learns that the other end is gone, or that the whole run
has failed, wakes the receiver with :meth:`Receiver.interrupt`.

A channel inside one process, between stages of one rank or ranks that are threads of a test.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_dist.engine.tensors.tree import flatten, unflatten


class PeerLostError(RuntimeError):
    """The process at the other end of a channel is gone."""


class ChannelClosedError(PeerLostError):
    """The process at the other end of a channel has closed it."""


class Sender(Protocol):
    """The near end of a channel out of this process."""

    def send(self, tree: Any, *, port: int = 0) -> None:
        """Hands a tree over; returns at once."""

    def close(self) -> None:
        """Waits until everything has been handed over, and ends the channel."""


class Receiver(Protocol):
    """The near end of a channel into this process."""

    def receive(self, *, port: int = 0) -> Any:
        """Waits for the next tree of a port."""

    def interrupt(self, error: BaseException) -> None:
        """Makes this and each later :meth:`receive` raise."""

    def close(self) -> None:
        """Waits until the far end has closed the channel."""


@dataclass(frozen=True, slots=True)
class Message:
    """A tree on its way.

    Attributes:
        tree: What was sent.
        port: Who waits for it.
    """

    tree: Any
    port: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Tells the reader of a queue why nothing more will come."""

    error: BaseException


class Inbox:
    """Sorts what comes out of a queue by port.

    Args:
        take: Waits for the next message.
    """

    def __init__(self, take: Callable[[], Message]) -> None:
        self._take = take
        self._waiting: dict[int, deque[Message]] = {}

    def next(self, port: int) -> Message:
        """Waits for the next message of a port; those of others stay for later.

        Args:
            port: Which.
        """
        while not self._waiting.get(port):
            message = self._take()
            self._waiting.setdefault(message.port, deque()).append(message)
        found = self._waiting[port].popleft()
        if not self._waiting[port]:
            del self._waiting[port]
        return found


class MemoryChannel:
    """Both ends of a channel."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message | Failed] = queue.SimpleQueue()
        self._inbox = Inbox(self._take)

    def send(self, tree: Any, *, port: int = 0) -> None:
        """Hands a tree over, its tensors cut from their graph."""
        tensors, skeleton = flatten(tree)
        cut = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        self._messages.put(Message(unflatten(cut, skeleton), port))

    def receive(self, *, port: int = 0) -> Any:
        """Waits for the next tree of a port."""
        return self._inbox.next(port).tree

    def _take(self) -> Message:
        message = self._messages.get()
        if isinstance(message, Failed):
            raise message.error
        return message

    def interrupt(self, error: BaseException) -> None:
        """Makes the next :meth:`receive` raise."""
        self._messages.put(Failed(error))

    def close(self) -> None:
        """Does nothing: there is no thread to end."""
