"""The protocols of both ends of a channel between two stages, on any transport.

A message is a tree of tensors with a tag. Stages on one rank share its channels, and only the tag
says which stage a message is for. Its *key* is what both ends know of its shapes beforehand. A
thread that learns that the other end is gone, or that the run has failed, wakes the receiver with
:meth:`Receiver.interrupt`. :class:`MemoryChannel` is a channel inside one process, between stages
of one rank or between ranks that are threads of a test.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

from typing_extensions import override

from lightning_dist.engine.tensors.tree import flatten, unflatten


class PeerLostError(RuntimeError):
    """The process at the other end of a channel is gone."""


class ChannelClosedError(PeerLostError):
    """The process at the other end of a channel has closed it."""


class Sender(Protocol):
    """The near end of a channel out of this process."""

    def send(self, tree: Any, *, tag: int = 0, key: Hashable = None) -> None:
        """Sends a tree; returns at once.

        Args:
            tree: Any tree.
            tag: Tag of the tree, any integer of 63 bits.
            key: What both ends know of the tree's shapes; None if they know nothing.

        Raises:
            PeerLostError: The receiver is gone.
        """

    def close(self, *, failed: bool = False) -> None:
        """Waits until everything has been sent, and closes the channel; again, does nothing.

        Args:
            failed: Whether the run has failed, so that the other end may not receive everything.
        """


class Receiver(Protocol):
    """The near end of a channel into this process."""

    def receive(self, *, tag: int = 0, key: Hashable = None) -> Any:
        """Waits for the next tree with a tag.

        Returns:
            The tree, on this end's device; its tensors require grad as the sent ones did.

        Raises:
            PeerLostError: The sender is gone.
            TimeoutError: Nothing came in time.
        """

    def interrupt(self, error: BaseException) -> None:
        """Raises an error in the present and each later :meth:`receive`."""

    def close(self, *, failed: bool = False) -> None:
        """Waits until the far end has closed the channel.

        Args:
            failed: Whether the run has failed, so that the other end may not send everything.
        """


@dataclass(frozen=True, slots=True)
class Message:
    """A tree on its way."""

    tree: Any
    tag: int


class Inbox:
    """Sorts the messages of a queue by tag.

    Args:
        take: Waits for the next message.
    """

    def __init__(self, take: Callable[[], Message]) -> None:
        self._take = take
        self._waiting: dict[int, deque[Message]] = {}

    def next(self, tag: int) -> Message:
        """Waits for the next message with a tag, and keeps messages with other tags for later."""
        while not self._waiting.get(tag):
            message = self._take()
            self._waiting.setdefault(message.tag, deque()).append(message)
        found = self._waiting[tag].popleft()
        if not self._waiting[tag]:
            del self._waiting[tag]
        return found


class MemoryChannel(Sender, Receiver):
    """Both ends of a channel; sent tensors are detached."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()
        self._inbox = Inbox(self._take)

    @override
    def send(self, tree: Any, *, tag: int = 0, key: Hashable = None) -> None:
        tensors, skeleton = flatten(tree)
        cut = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        self._messages.put(Message(unflatten(cut, skeleton), tag))

    @override
    def receive(self, *, tag: int = 0, key: Hashable = None) -> Any:
        return self._inbox.next(tag).tree

    def _take(self) -> Message:
        message = self._messages.get()
        if isinstance(message, BaseException):
            raise message
        return message

    @override
    def interrupt(self, error: BaseException) -> None:
        self._messages.put(error)

    @override
    def close(self, *, failed: bool = False) -> None:
        """Does nothing, since there is no thread to end."""
