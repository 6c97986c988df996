"""The orders of work, short functions that yield one rank's compute actions, and their families.

A new synchronous schedule is an order and a family, both in this file. A function yields what one
rank computes; what is sent, reduced and updated follows in :func:`.lower`. docs/schedules.md draws
each order.

- GPipe: Huang et al. 2019, section 2.
- 1F1B: Narayanan et al. 2021 (Megatron-LM), section 2.2.1, after PipeDream: Narayanan et al. 2019,
  section 3.2.
- Interleaved: Narayanan et al. 2021, section 2.2.2. A rank that waits for one stage works for
  another, and the bubble shrinks by as much. If the micro-batches are no multiple of the ranks, a
  round is larger than that, as in torch.
- Breadth first: Lamy-Poirier 2023, section 3.1.
- Zero-bubble orders split a backward in two. The stage before waits for the gradients of a stage's
  inputs (``I``). Those of its weights (``W``) are for the optimizer only, and fill the bubble.
  Qi et al. 2023: ZB-H1 is section 2.2 (no more in flight than 1F1B), ZB-V section 6 (the same
  memory, two stages per rank, and with equal times no bubble within a rank's span, if there are at
  least ``2n - 1`` micro-batches for ``n`` ranks).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.family import MicrobatchRule, RankStages, ScheduleFamily

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT  # noqa: E741


def forward_only(place: RankStages, count: int) -> Iterator[Action]:
    """Yields each stage's forwards; an :data:`.Order`, as all functions here."""
    yield from (Action(stage, F, index) for stage in place.stages for index in range(count))


def _gpipe(place: RankStages, count: int) -> Iterator[Action]:
    (stage,) = place.stages
    yield from (Action(stage, F, index) for index in range(count))
    yield from (Action(stage, B, index) for index in range(count))


def _looped_bfs(place: RankStages, count: int) -> Iterator[Action]:
    yield from forward_only(place, count)
    for stage in reversed(place.stages):
        yield from (Action(stage, B, index) for index in reversed(range(count)))


def one_forward_one_backward(place: RankStages, count: int) -> Iterator[Action]:
    """Yields one forward per later stage first, then forwards and backwards in turn."""
    (stage,) = place.stages
    warmup = min(place.num_ranks - 1 - place.rank, count)
    yield from (Action(stage, F, index) for index in range(warmup))
    for index in range(warmup, count):
        yield Action(stage, F, index)
        yield Action(stage, B, index - warmup)
    yield from (Action(stage, B, index) for index in range(count - warmup, count))


def _interleaved(place: RankStages, count: int) -> Iterator[Action]:
    # A round of micro-batches of a stage, then of the rank's next stage. The rounds are equal.
    size = count // max(1, count // place.num_ranks)
    forwards = list(_in_rounds(F, place.stages, size, count))
    backwards = list(_in_rounds(B, place.stages[::-1], size, count))
    # The first backward is the last stage's, so the laps before it are forwards only.
    laps, hops = len(place.stages) - 1, place.num_ranks - 1 - place.rank
    warmup = min(laps * size + 2 * hops, len(forwards))
    yield from forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warmup :]


def _in_rounds(
    kind: ActionKind, stages: tuple[int, ...], size: int, count: int
) -> Iterator[Action]:
    for first in range(0, count, size):
        for stage in stages:
            yield from (Action(stage, kind, index) for index in range(first, first + size))


def _zb_h1(place: RankStages, count: int) -> Iterator[Action]:
    # Each weights' part is delayed by one micro-batch per earlier rank, so each rank has as many
    # micro-batches in flight as the first rank. The last ones fill the time in which 1F1B drains.
    (stage,) = place.stages
    warmup = min(place.num_ranks - 1 - place.rank, count)
    yield from (Action(stage, F, index) for index in range(warmup))
    for index in range(count):
        if index + warmup < count:
            yield Action(stage, F, index + warmup)
        yield Action(stage, I, index)
        if index >= place.rank:
            yield Action(stage, W, index - place.rank)
    yield from (Action(stage, W, index) for index in range(max(0, count - place.rank), count))


def _v_placement(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Turns at each end: a rank's next stage receives from the rank to which its last one sends."""
    there = tuple(range(num_ranks))
    return sum((there[:: -1 if lap % 2 else 1] for lap in range(stages_per_rank)), start=())


def _zbv(place: RankStages, count: int) -> Iterator[Action]:
    # With too few micro-batches to fill the pipeline: the full order without the missing ones.
    full = max(2 * place.num_ranks - 1, count)
    return (action for action in _full_v(place, full) if action.microbatch_index < count)


def _full_v(place: RankStages, count: int) -> Iterator[Action]:
    down, up = place.stages  # the arms of the V
    done: Counter[tuple[int, ActionKind]] = Counter()
    before, behind = place.rank, place.num_ranks - place.rank  # `behind` includes this rank

    def run(stage: int, *kinds: ActionKind) -> Iterator[Action]:
        for kind in kinds:
            yield Action(stage, kind, done[stage, kind])
            done[stage, kind] += 1

    for _ in range(2 * behind - 1):
        yield from run(down, F)
    for _ in range(before):
        yield from run(up, F)
        yield from run(down, F)
    for _ in range(behind):
        yield from run(up, F, I, W)
    while done[up, F] < count:
        if done[down, F] < count:
            yield from run(down, F)
        yield from run(down, I, W)
        yield from run(up, F, I, W)
    for _ in range(before):
        yield from run(down, I)
        yield from run(up, I)
    for _ in range(behind):
        yield from run(down, I, W)
    for stage in (up, down):
        while done[stage, W] < count:
            yield from run(stage, W)


# --- the families --------------------------------------------------------------------------------


_ROUNDS = MicrobatchRule(
    lambda num_ranks, count: count % max(1, count // num_ranks) == 0,
    "they pass the ranks in equal rounds, each of at least as many as there are ranks",
)
SYNCHRONOUS = (
    ScheduleFamily("gpipe", _gpipe),
    ScheduleFamily("1f1b", one_forward_one_backward),
    ScheduleFamily(
        "interleaved_1f1b",
        _interleaved,
        fewest_stages=2,
        most_stages=None,
        microbatch_rule=_ROUNDS,
    ),
    ScheduleFamily("looped_bfs", _looped_bfs, fewest_stages=2, most_stages=None),
    ScheduleFamily("zb_h1", _zb_h1),
    ScheduleFamily("zbv", _zbv, place=_v_placement, fewest_stages=2, most_stages=2),
)
"""The synchronous kinds of schedules, in the order in which they are listed to users."""
