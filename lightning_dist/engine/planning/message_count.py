"""Count what goes to other ranks where torch cannot see it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class MessageCount:
    """Messages through memory that two processes share; those by a socket are torch's operations.

    Attributes:
        count: How many there have been.
        num_bytes: Of all of them together.
    """

    count: int = 0
    num_bytes: int = 0

    def add(self, num_bytes: int) -> None:
        """Enters a message.

        Args:
            num_bytes: Of its packet.
        """
        self.count += 1
        self.num_bytes += num_bytes
