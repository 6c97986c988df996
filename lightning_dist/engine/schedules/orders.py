"""The orders of work, as short functions that yield one rank's compute actions.

With one stage per rank; four micro-batches on three ranks, a column per unit of time (``F`` and
``B`` equally long here):

.. code-block:: text

    gpipe      F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3     all forwards, then all backwards
               .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
               .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

    1f1b       F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3     fewer in flight, the same bubble
               .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
               .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

With several, a rank that waits for one stage works for another, and the bubble shrinks by as much.
Four micro-batches on two ranks with two stages each:

.. code-block:: text

    interleaved  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1  .  2B2  .  2B3 0B2 0B3
    1f1b          .  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3  .

    looped       0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3  .   .  2B3 2B2 2B1 2B0 0B3 0B2 0B1 0B0
    bfs           .  1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B3 3B2 3B1 3B0 1B3 1B2 1B1 1B0  .

GPipe: Huang et al. 2019, section 2. 1F1B: Narayanan et al. 2021 (Megatron-LM), section 2.2.1, after
PipeDream: Narayanan et al. 2019, section 3.2. Interleaved: the same, section 2.2.2; where the
micro-batches are no multiple of the ranks, in rounds of more than that, as torch does. Breadth
first: Lamy-Poirier 2023, section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.placement import Seat

F, B = ActionKind.FORWARD, ActionKind.BACKWARD

Order = Callable[[Seat, int], Iterator[Action]]
"""Takes a rank's place and the micro-batches."""


def forward_only(seat: Seat, count: int) -> Iterator[Action]:
    """Runs each stage's forwards.

    Args:
        seat: The rank.
        count: Micro-batches.
    """
    yield from (Action(stage, F, index) for stage in seat.stages for index in range(count))


def gpipe(seat: Seat, count: int) -> Iterator[Action]:
    """Runs all forwards, then all backwards.

    Args:
        seat: The rank; has one stage.
        count: Micro-batches.
    """
    (stage,) = seat.stages
    yield from (Action(stage, F, index) for index in range(count))
    yield from (Action(stage, B, index) for index in range(count))


def looped_bfs(seat: Seat, count: int) -> Iterator[Action]:
    """Runs all micro-batches through a stage before the next one, and back.

    Args:
        seat: The rank.
        count: Micro-batches.
    """
    yield from forward_only(seat, count)
    for stage in reversed(seat.stages):
        yield from (Action(stage, B, index) for index in reversed(range(count)))


def one_forward_one_backward(seat: Seat, count: int) -> Iterator[Action]:
    """Runs ahead by as many forwards as there are stages behind, then keeps in step.

    Args:
        seat: The rank; has one stage.
        count: Micro-batches.
    """
    (stage,) = seat.stages
    warmup = min(seat.num_ranks - 1 - seat.rank, count)
    yield from (Action(stage, F, index) for index in range(warmup))
    for index in range(warmup, count):
        yield Action(stage, F, index)
        yield Action(stage, B, index - warmup)
    yield from (Action(stage, B, index) for index in range(count - warmup, count))


def interleaved(seat: Seat, count: int) -> Iterator[Action]:
    """Runs a round of micro-batches through a stage, then through the rank's next one.

    Args:
        seat: The rank.
        count: Micro-batches; they pass in equal rounds, each of as many as ranks or some more.
    """
    size = count // max(1, count // seat.num_ranks)
    forwards = list(_in_rounds(F, seat.stages, size, count))
    backwards = list(_in_rounds(B, seat.stages[::-1], size, count))
    # The first backward is the last stage's, so the laps before it are forwards only.
    laps, hops = len(seat.stages) - 1, seat.num_ranks - 1 - seat.rank
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
