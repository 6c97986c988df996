"""Formulas against the algorithms themselves, which move blocks between ranks round by round."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import pytest

from lightning_dist.engine.planning.collectives import (
    ALGORITHMS,
    Algorithm,
    fastest,
    least_seconds_of_all_reduce,
    winners,
)
from lightning_dist.engine.planning.links import Link
from lightning_dist.engine.planning.traffic import MessageKind

Block = Hashable
LINK = Link(latency_seconds=50e-6, bytes_per_second=1e9)


@dataclass(frozen=True)
class Message:
    sender: int
    receiver: int
    blocks: tuple[Block, ...]


Rounds = list[list[Message]]


@dataclass
class Ranks:
    """What each rank holds: of each block, the ranks whose values are in it."""

    held: list[dict[Block, frozenset[int]]]
    num_rounds: int = 0
    num_blocks: int = 0  # sent one after another

    def go(self, rounds: Rounds, *, adds: bool) -> None:
        """Sends messages; a receiver adds a block to its own, or replaces that."""
        for messages in rounds:
            for ends in ([m.sender for m in messages], [m.receiver for m in messages]):
                assert len(ends) == len(set(ends)), "a rank sends one message at a time"
            sent = [{b: self.held[m.sender][b] for b in m.blocks} for m in messages]
            for message, blocks in zip(messages, sent, strict=True):
                own = self.held[message.receiver]
                for block, value in blocks.items():
                    before = own.get(block, frozenset()) if adds else frozenset()
                    assert not before & value, "a value is added twice"
                    own[block] = before | value
            self.num_rounds += 1
            self.num_blocks += max(len(m.blocks) for m in messages)


def reverse(rounds: Rounds) -> Rounds:
    """Turns a broadcast into a reduction, and an all-gather into a reduce-scatter."""
    return [[Message(m.receiver, m.sender, m.blocks) for m in r] for r in reversed(rounds)]


def naive(p: int, blocks: Callable[[int], Sequence[Block]]) -> Rounds:
    return [[Message(0, rank, tuple(blocks(rank)))] for rank in range(1, p)]


def tree(p: int, blocks: Iterable[Block]) -> Rounds:
    distances = [1 << k for k in range((p - 1).bit_length())]
    everything = tuple(blocks)
    return [[Message(r, r + d, everything) for r in range(d) if r + d < p] for d in distances]


def tree_of_parts(p: int) -> Rounds:
    rounds = []
    for k in reversed(range((p - 1).bit_length())):
        starts = [r for r in range(0, p, 2 << k) if r + (1 << k) < p]
        parts = {r: range(r + (1 << k), min(r + (2 << k), p)) for r in starts}
        rounds.append([Message(r, r + (1 << k), tuple(parts[r])) for r in starts])
    return rounds


def ring(p: int) -> Rounds:
    return [[Message(r, (r + 1) % p, ((r - i) % p,)) for r in range(p)] for i in range(p - 1)]


def bruck(p: int) -> Rounds:
    rounds = []
    for k in range((p - 1).bit_length()):
        count = min(1 << k, p - (1 << k))
        parts = [tuple((r + i) % p for i in range(count)) for r in range(p)]
        rounds.append([Message(r, (r - (1 << k)) % p, parts[r]) for r in range(p)])
    return rounds


def doubling(p: int, parts: Callable[[int, int], Iterable[Block]]) -> Rounds:
    distances = [1 << k for k in range((p - 1).bit_length())]
    return [[Message(r, r ^ d, tuple(parts(r, d))) for r in range(p)] for d in distances]


def power_of_two(p: int) -> int:
    return max(1 << k for k in range(p) if 1 << k <= p)


def fold(p: int, blocks: Iterable[Block]) -> Rounds:
    power, everything = power_of_two(p), tuple(blocks)
    return [[Message(r, r - power, everything) for r in range(power, p)]] if power < p else []


def pairwise(p: int) -> Rounds:
    return [[Message(r, (r + i) % p, ((r, (r + i) % p),)) for r in range(p)] for i in range(1, p)]


def bruck_all_to_all(p: int) -> Rounds:
    """A block goes on by 2^k in round k, if that is a part of the way to its receiver."""
    rounds = []
    for k in range((p - 1).bit_length()):
        moving = [way for way in range(p) if way >> k & 1]
        so_far = {way: way & ((1 << k) - 1) for way in moving}
        rounds.append(
            [
                Message(
                    r,
                    (r + (1 << k)) % p,
                    tuple(((r - so_far[w]) % p, (r - so_far[w] + w) % p) for w in moving),
                )
                for r in range(p)
            ]
        )
    return rounds


def aligned(rank: int, distance: int) -> range:
    start = rank - rank % distance
    return range(start, start + distance)


Phases = list[tuple[Rounds, bool]]  # and whether receivers add up


def phases(kind: MessageKind, name: str, p: int) -> Phases:
    """Returns the rounds of an algorithm."""
    blocks, power = range(p), power_of_two(p)
    parts = range(power)
    there: dict[tuple[MessageKind, str], Rounds] = {
        (MessageKind.SEND, "direct"): [[Message(0, 1, tuple(blocks))]],
        (MessageKind.BROADCAST, "naive"): naive(p, lambda _: blocks),
        (MessageKind.BROADCAST, "tree"): tree(p, blocks),
        (MessageKind.SCATTER, "naive"): naive(p, lambda rank: [rank]),
        (MessageKind.SCATTER, "tree"): tree_of_parts(p),
        (MessageKind.ALL_GATHER, "ring"): ring(p),
        (MessageKind.ALL_GATHER, "Bruck"): bruck(p),
        (MessageKind.ALL_TO_ALL, "pairwise"): pairwise(p),
        (MessageKind.ALL_TO_ALL, "Bruck"): bruck_all_to_all(p),
    }
    first, last = fold(p, parts), reverse(fold(p, parts))
    halving = doubling(power, aligned)
    more: dict[tuple[MessageKind, str], Phases] = {
        (MessageKind.BROADCAST, "scatter and all-gather"): [
            (tree_of_parts(p), False),
            (ring(p), False),
        ],
        (MessageKind.REDUCE, "reduce-scatter and gather"): [
            (reverse(ring(p)), True),
            (reverse(tree_of_parts(p)), False),
        ],
        (MessageKind.ALL_REDUCE, "recursive doubling"): [
            (first, True),
            (doubling(power, lambda _, __: parts), True),
            (last, False),
        ],
        (MessageKind.ALL_REDUCE, "recursive halving and doubling"): [
            (first, True),
            (reverse(halving), True),
            (halving, False),
            (last, False),
        ],
        **{key: [(rounds, False)] for key, rounds in there.items()},
    }
    for kinds, adds in (
        ((MessageKind.BROADCAST, MessageKind.REDUCE), True),
        ((MessageKind.SCATTER, MessageKind.GATHER), False),
        ((MessageKind.ALL_GATHER, MessageKind.REDUCE_SCATTER), True),
    ):
        back = {n: reverse(rounds) for (k, n), rounds in there.items() if k == kinds[0]}
        more |= {(kinds[1], n): [(rounds, adds)] for n, rounds in back.items()}
    for n in ("naive", "tree"):
        reduced, spread = more[MessageKind.REDUCE, n], more[MessageKind.BROADCAST, n]
        more[MessageKind.ALL_REDUCE, n] = [*reduced, *spread]
    more[MessageKind.ALL_REDUCE, "ring"] = [(reverse(ring(p)), True), (ring(p), False)]
    return more[kind, name]


def begin(kind: MessageKind, p: int, num_blocks: int) -> Ranks:
    """Returns what the ranks hold at first."""
    blocks = range(num_blocks)
    if kind in (MessageKind.SEND, MessageKind.BROADCAST, MessageKind.SCATTER):
        return Ranks([dict.fromkeys(blocks, frozenset({0})), *({} for _ in range(p - 1))])
    if kind in (MessageKind.GATHER, MessageKind.ALL_GATHER):
        return Ranks([{r: frozenset({r})} for r in range(p)])
    if kind == MessageKind.ALL_TO_ALL:
        return Ranks([{(r, to): frozenset({r}) for to in range(p)} for r in range(p)])
    return Ranks([dict.fromkeys(blocks, frozenset({r})) for r in range(p)])


def is_done(
    kind: MessageKind, p: int, num_blocks: int, held: list[dict[Block, frozenset[int]]]
) -> bool:
    """Returns whether each rank holds what the collective is for."""
    whole = frozenset(range(p))
    everything = set(range(num_blocks))
    match kind:
        case MessageKind.SEND:
            return held[1].keys() == everything
        case MessageKind.BROADCAST:
            return all(blocks.keys() == everything for blocks in held)
        case MessageKind.SCATTER:
            return all(r in held[r] for r in range(p))
        case MessageKind.GATHER:
            return held[0] == {r: frozenset({r}) for r in range(p)}
        case MessageKind.ALL_GATHER:
            return all(blocks == {r: frozenset({r}) for r in range(p)} for blocks in held)
        case MessageKind.REDUCE:
            return held[0] == dict.fromkeys(everything, whole)
        case MessageKind.REDUCE_SCATTER:
            return all(held[r][r] == whole for r in range(p))
        case MessageKind.ALL_REDUCE:
            return all(blocks == dict.fromkeys(everything, whole) for blocks in held)
        case MessageKind.ALL_TO_ALL:
            return all({(r, to) for r in range(p)} <= held[to].keys() for to in range(p))


CASES = [(kind, algorithm) for kind, found in ALGORITHMS.items() for algorithm in found]


@pytest.mark.parametrize(("kind", "algorithm"), CASES, ids=[f"{k}, {a.name}" for k, a in CASES])
@pytest.mark.parametrize("p", [2, 3, 5, 8, 13])
def test_algorithms_take_the_rounds_and_bytes_of_their_formulas(
    kind: MessageKind, algorithm: Algorithm, p: int
) -> None:
    num_blocks = power_of_two(p) if algorithm.name.startswith("recursive") else p
    ranks = begin(kind, p, num_blocks)
    for rounds, adds in phases(kind, algorithm.name, p):
        ranks.go(rounds, adds=adds)
    assert is_done(kind, p, num_blocks, ranks.held)
    assert ranks.num_rounds == algorithm.rounds(p)
    assert ranks.num_blocks / num_blocks == pytest.approx(algorithm.share(p), rel=1e-12)


@pytest.mark.parametrize("p", [2, 3, 8, 12, 64])
@pytest.mark.parametrize("kind", ALGORITHMS)
def test_winners_are_the_fastest_on_their_own_ground(kind: MessageKind, p: int) -> None:
    found = winners(kind, p, LINK)
    starts = [size for size, _ in found]
    assert starts[0] == 0.0
    assert starts == sorted(set(starts))
    for (start, algorithm), end in zip(found, [*starts[1:], 1e12], strict=True):
        for size in (start + 0.01 * (end - start), end - 0.01 * (end - start)):
            assert algorithm == fastest(kind, p, size, LINK)


def test_a_long_all_reduce_is_within_the_latencies_of_its_bound() -> None:
    size = 1e9
    least = least_seconds_of_all_reduce(16, size, LINK)
    assert least == pytest.approx(2 * size * 15 / (16 * LINK.bytes_per_second))
    for p, name in ((16, "recursive halving and doubling"), (12, "ring")):
        assert winners(MessageKind.ALL_REDUCE, p, LINK)[-1][1].name == name
    seconds = fastest(MessageKind.ALL_REDUCE, 16, size, LINK).seconds(16, size, LINK)
    assert seconds == pytest.approx(least + 8 * LINK.latency_seconds)
