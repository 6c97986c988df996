"""The comparison of all ranks' clocks with that of rank 0, by round trips.

The answer was written somewhere between the sending and the receiving, so half of the round trip
bounds the error, whatever time each way took. The quickest of several round trips gives the best
bound (D. L. Mills, RFC 5905; F. Cristian, Distributed Computing 3, 1989).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_dist.engine.profiling.record import ClockOffset

_NUM_PINGS = 12


class Ping(NamedTuple):
    """Seconds of a question and its answer, the latter by the answering rank's clock."""

    sent: float
    answered: float
    received: float


def estimate_offset(pings: Sequence[Ping]) -> ClockOffset:
    """Returns how far the answering rank's clock is ahead of the asking rank's."""
    best = min(pings, key=lambda ping: ping.received - ping.sent)
    middle = (best.sent + best.received) / 2
    return ClockOffset(best.answered - middle, (best.received - best.sent) / 2)


def exchange_pings(clock: Callable[[], float], group: dist.ProcessGroup) -> tuple[ClockOffset, ...]:
    """Measures each rank's clock offset from the first rank's. Collective: every rank must call it.

    The first rank asks the others in turn, so that no message waits for another one. The group is a
    gloo group, in which nothing else may be under way. All ranks return the same, by rank.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    offsets = [ClockOffset() for _ in range(size)]
    first = dist.get_global_rank(group, 0)
    for peer in range(1, size):
        if rank == 0:
            other = dist.get_global_rank(group, peer)
            offsets[peer] = estimate_offset([_ask(clock, other, group) for _ in range(_NUM_PINGS)])
        elif rank == peer:
            for _ in range(_NUM_PINGS):
                _answer(clock, first, group)
    flat = torch.tensor(offsets, dtype=torch.float64)
    dist.broadcast(flat, first, group=group)
    return tuple(ClockOffset(*row) for row in flat.tolist())


def _ask(clock: Callable[[], float], peer: int, group: dist.ProcessGroup) -> Ping:
    message = torch.zeros(1, dtype=torch.float64)
    sent = clock()
    dist.send(message, peer, group=group)
    dist.recv(message, peer, group=group)
    return Ping(sent, message.item(), clock())


def _answer(clock: Callable[[], float], first: int, group: dist.ProcessGroup) -> None:
    message = torch.zeros(1, dtype=torch.float64)
    dist.recv(message, first, group=group)
    message[0] = clock()
    dist.send(message, first, group=group)
