"""A channel inside one process, between stages of one rank or ranks that are threads of a test."""

from __future__ import annotations

import queue
from typing import Any

from lightning_dist.engine.comms.channel import Failed, Inbox, Message
from lightning_dist.engine.tensors.tree import flatten, unflatten


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
