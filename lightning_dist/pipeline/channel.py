"""What both ends of a channel between two stages promise, over whatever it runs.

A message is a tree of tensors with a *stamp*, a number on whose meaning sender and receiver agree;
stages stamp activations with the fingerprint of the batch. Whoever learns that the other end is
gone, or that the whole run has failed, wakes the receiver with :meth:`Receiver.interrupt`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class PeerLostError(RuntimeError):
    """The process at the other end of a channel is gone."""


class ChannelClosedError(PeerLostError):
    """The process at the other end of a channel has closed it."""


class StampError(RuntimeError):
    """A message is not about what its receiver takes it to be about."""


class Sender(Protocol):
    """The near end of a channel out of this process."""

    def send(self, tree: Any, stamp: int = 0) -> None:
        """Hands a tree over; returns at once."""

    def close(self) -> None:
        """Waits until everything has been handed over, and ends the channel."""


class Receiver(Protocol):
    """The near end of a channel into this process."""

    def receive(self, stamp: int = 0) -> Any:
        """Waits for the next tree, which must have been sent with an equal stamp."""

    def interrupt(self, error: BaseException) -> None:
        """Makes this and each later :meth:`receive` raise."""

    def close(self) -> None:
        """Waits until the far end has closed the channel."""


@dataclass(frozen=True, slots=True)
class Message:
    """A tree on its way.

    Attributes:
        tree: What was sent.
        stamp: What the sender says it is about.
    """

    tree: Any
    stamp: int

    def opened(self, stamp: int) -> Any:
        """Gives the tree.

        Args:
            stamp: What the receiver takes it to be about.

        Raises:
            StampError: It is about something else.
        """
        if stamp != self.stamp:
            raise StampError(f"Sent with the stamp {self.stamp}, expected with {stamp}.")
        return self.tree


@dataclass(frozen=True, slots=True)
class Failed:
    """Tells the reader of a queue why nothing more will come."""

    error: BaseException
