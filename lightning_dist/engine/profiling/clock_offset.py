"""By how much another host's clock is ahead, from messages that went there and back.

The answer was written somewhere between the sending and the receiving, so half of the round trip
bounds the error, whatever the two ways took. The quickest round trip of several bounds it best
(D. L. Mills, RFC 5905; F. Cristian, Distributed Computing 3, 1989).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ping:
    """A message there and back, in seconds.

    Attributes:
        sent: By the clock of who asks.
        answered: By the clock of who answers.
        received: By the clock of who asks.
    """

    sent: float
    answered: float
    received: float

    @property
    def round_trip_seconds(self) -> float:
        """There and back."""
        return self.received - self.sent


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far one clock is ahead of another.

    Attributes:
        seconds: The estimate.
        uncertainty_seconds: The truth is no farther from it than this.
    """

    seconds: float = 0.0
    uncertainty_seconds: float = 0.0


def estimate_offset(pings: Sequence[Ping]) -> ClockOffset:
    """Tells by how much the clock of who answers is ahead of that of who asks.

    Args:
        pings: At least one.
    """
    best = min(pings, key=lambda ping: ping.round_trip_seconds)
    middle = (best.sent + best.received) / 2
    return ClockOffset(best.answered - middle, best.round_trip_seconds / 2)
