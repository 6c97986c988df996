"""A rank's messages to other ranks in a training step, by kind and by mesh axes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum


class MessageKind(StrEnum):
    """How ranks exchange tensors."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    SCATTER = "scatter"
    GATHER = "gather"
    SEND = "send"
    """From one rank to one other."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """All messages of one kind over the same axes of a mesh.

    Attributes:
        kind: Kind of the messages.
        axes: Axes along which the ranks that exchange the messages differ.
        count: Number of messages.
        num_bytes: Bytes of all messages together, each at its larger end: an all-gather's output, a
            reduce-scatter's input. The bytes on the network depend on the algorithm.
    """

    kind: MessageKind
    axes: tuple[str, ...]
    count: int
    num_bytes: int


class TrafficLedger:
    """Sums messages by kind and axes."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[MessageKind, tuple[str, ...]]] = Counter()
        self._bytes: Counter[tuple[MessageKind, tuple[str, ...]]] = Counter()

    def add(self, kind: MessageKind, axes: tuple[str, ...], num_bytes: int, count: int = 1) -> None:
        """Adds messages of so many bytes together, each at its larger end; see :class:`Traffic`."""
        self._counts[kind, axes] += count
        self._bytes[kind, axes] += num_bytes

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """The sums, by kind and then by axes."""
        order = list(MessageKind)
        keys = sorted(self._counts, key=lambda key: (order.index(key[0]), key[1]))
        return tuple(Traffic(*key, self._counts[key], self._bytes[key]) for key in keys)
