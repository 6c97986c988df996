"""What a rank tells other ranks in a training step, by kind and by who they are.

Count what goes to other ranks where torch cannot see it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum


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


class MessageKind(StrEnum):
    """How ranks exchange tensors."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "broadcast"
    SEND = "send"
    """From one rank to one other."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """All messages of one kind over the same axes of a mesh.

    Attributes:
        kind: Of the messages.
        axes: Along which the ranks that exchange them differ.
        count: Number of messages.
        num_bytes: Of all of them together, each at its larger end: what an all-gather gives, what a
            reduce-scatter takes. What that is on the wire depends on the algorithm.
    """

    kind: MessageKind
    axes: tuple[str, ...]
    count: int
    num_bytes: int


class TrafficLedger:
    """Adds messages up."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[MessageKind, tuple[str, ...]]] = Counter()
        self._bytes: Counter[tuple[MessageKind, tuple[str, ...]]] = Counter()

    def add(self, kind: MessageKind, axes: tuple[str, ...], num_bytes: int, count: int = 1) -> None:
        """Enters a message, or some.

        Args:
            kind: Of the message.
            axes: Along which the ranks that exchange it differ.
            num_bytes: At its larger end; of all of them together.
            count: How many.
        """
        self._counts[kind, axes] += count
        self._bytes[kind, axes] += num_bytes

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """The sums, by kind and then by axes."""
        order = list(MessageKind)
        keys = sorted(self._counts, key=lambda key: (order.index(key[0]), key[1]))
        return tuple(Traffic(*key, self._counts[key], self._bytes[key]) for key in keys)
