"""What collectives cost: rounds of messages, and the bytes that a link carries in them.

Each algorithm goes in rounds. In a round a rank sends one message and receives one, at the same
time. So its time is ``rounds * latency + share * V / bandwidth``, where V is the bytes of the whole
tensor: a rank's own one for broadcast, reduce, all-reduce and all-to-all, the gathered one for
gather and all-gather, the one that is cut for scatter and reduce-scatter. Adding up counts nothing.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH"
(IJHPCA 19, 2005); Bruck et al. (IEEE TPDS 8, 1997); Patarasuk, Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations" (JPDC 69, 2009) for the bound of an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lightning_dist.engine.planning.links import Link
from lightning_dist.engine.planning.traffic import MessageKind


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A way to do a collective.

    Attributes:
        name: Name in the literature.
        rounds: Number of rounds, by the number of ranks.
        share: Bytes that a link carries one after another, as a multiple of V, by the number of
            ranks.
    """

    name: str
    rounds: Callable[[int], int]
    share: Callable[[int], float]

    def seconds(self, num_ranks: int, num_bytes: float, link: Link) -> float:
        """Returns the seconds that the collective takes.

        Args:
            num_ranks: Number of ranks, at least 2.
            num_bytes: Bytes of the whole tensor.
            link: Link of each rank.
        """
        latency = self.rounds(num_ranks) * link.latency_seconds
        return latency + self.share(num_ranks) * num_bytes / link.bytes_per_second


def _others(p: int) -> int:
    return p - 1


def _levels(p: int) -> int:
    """Returns log2 of p, rounded up."""
    return (p - 1).bit_length()


def _rest(p: int) -> float:
    """Returns the share of all parts but one."""
    return (p - 1) / p


def _folds(p: int) -> int:
    """Returns 2 if p is no power of two: ranks beyond one hand over first, and get back last."""
    return 2 * (p & (p - 1) != 0)


def _power(p: int) -> int:
    """Returns the largest power of two up to p."""
    return 1 << (p.bit_length() - 1)


def _bruck_blocks(p: int) -> float:
    """Returns the blocks of an all-to-all that move in some round, over p."""
    return sum(block.bit_count() for block in range(p)) / p


_NAIVE = Algorithm("naive", _others, _others)
_NAIVE_PARTS = Algorithm("naive", _others, _rest)
_TREE = Algorithm("tree", _levels, _levels)
_TREE_OF_PARTS = Algorithm("tree", _levels, _rest)
_RING = Algorithm("ring", _others, _rest)
_BRUCK = Algorithm("Bruck", _levels, _rest)


def _parts_and_ring(name: str) -> Algorithm:
    return Algorithm(name, lambda p: _levels(p) + p - 1, lambda p: 2 * _rest(p))


ALGORITHMS: Mapping[MessageKind, tuple[Algorithm, ...]] = MappingProxyType(
    {
        MessageKind.SEND: (Algorithm("direct", lambda p: 1, lambda p: 1.0),),
        MessageKind.BROADCAST: (_NAIVE, _TREE, _parts_and_ring("scatter and all-gather")),
        MessageKind.REDUCE: (_NAIVE, _TREE, _parts_and_ring("reduce-scatter and gather")),
        MessageKind.SCATTER: (_NAIVE_PARTS, _TREE_OF_PARTS),
        MessageKind.GATHER: (_NAIVE_PARTS, _TREE_OF_PARTS),
        MessageKind.ALL_GATHER: (_RING, _BRUCK),
        MessageKind.REDUCE_SCATTER: (_RING, _BRUCK),
        MessageKind.ALL_REDUCE: (
            Algorithm("naive", lambda p: 2 * (p - 1), lambda p: 2 * (p - 1)),
            Algorithm("tree", lambda p: 2 * _levels(p), lambda p: 2 * _levels(p)),
            Algorithm("ring", lambda p: 2 * (p - 1), lambda p: 2 * _rest(p)),
            Algorithm(
                "recursive doubling",
                lambda p: _levels(_power(p)) + _folds(p),
                lambda p: _levels(_power(p)) + _folds(p),
            ),
            Algorithm(
                "recursive halving and doubling",
                lambda p: 2 * _levels(_power(p)) + _folds(p),
                lambda p: 2 * _rest(_power(p)) + _folds(p),
            ),
        ),
        MessageKind.ALL_TO_ALL: (
            Algorithm("pairwise", _others, _rest),
            Algorithm("Bruck", _levels, _bruck_blocks),
        ),
    }
)
"""The algorithms of each kind of message."""


def ring(kind: MessageKind) -> Algorithm:
    """Returns the ring of an all-gather, a reduce-scatter or an all-reduce."""
    return next(algorithm for algorithm in ALGORITHMS[kind] if algorithm.name == "ring")


def least_seconds_of_all_reduce(num_ranks: int, num_bytes: float, link: Link) -> float:
    """Returns the seconds below which no all-reduce is: 2 V (p - 1) / (p * bandwidth)."""
    return 2 * _rest(num_ranks) * num_bytes / link.bytes_per_second


def fastest(kind: MessageKind, num_ranks: int, num_bytes: float, link: Link) -> Algorithm:
    """Returns the algorithm that takes least time; see :meth:`Algorithm.seconds`."""
    return min(ALGORITHMS[kind], key=lambda a: a.seconds(num_ranks, num_bytes, link))


def winners(kind: MessageKind, num_ranks: int, link: Link) -> list[tuple[float, Algorithm]]:
    """Lists the algorithms that win at some size.

    Args:
        kind: Kind of the collective.
        num_ranks: Number of ranks, at least 2.
        link: Link of each rank; its latency is above 0.

    Returns:
        The bytes from which each one is the fastest, in rising order; the first begins at 0.
    """
    found = [(0.0, fastest(kind, num_ranks, 0.0, link))]
    while True:
        _, best = found[-1]
        crossings = [
            (_crossing(best, other, num_ranks, link), other.rounds(num_ranks), other)
            for other in ALGORITHMS[kind]
            if other.share(num_ranks) < best.share(num_ranks)
        ]
        if not crossings:
            return found
        size, _, after = min(crossings, key=lambda crossing: crossing[:2])
        if size == 0.0:  # as few rounds, and fewer bytes
            found.pop()
        found.append((size, after))


def _crossing(first: Algorithm, second: Algorithm, num_ranks: int, link: Link) -> float:
    """Returns the bytes from which the second one, which sends less, is faster."""
    rounds = second.rounds(num_ranks) - first.rounds(num_ranks)
    share = first.share(num_ranks) - second.share(num_ranks)
    return rounds * link.latency_seconds * link.bytes_per_second / share
