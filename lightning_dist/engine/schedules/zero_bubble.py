"""Orders that part a backward in two, and fill the bubble with the part that nobody waits for.

The gradients of a stage's inputs (``I``) are what the stage before waits for; those of its weights
(``W``) only the optimizer needs. Three ranks, five micro-batches, all actions equally long:

.. code-block:: text

    zb_h1   F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
            .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
            .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

Qi et al. 2023, "Zero Bubble Pipeline Parallelism": ZB-H1 is section 2.2 (no more in flight than
1F1B), ZB-V section 6 (the same memory, two stages per rank, and with equal times no bubble within a
rank's span).
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.placement import Seat

F, I, W = ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT  # noqa: E741


def zb_h1(seat: Seat, count: int) -> Iterator[Action]:
    """Runs 1F1B, and holds each weight part back by as many micro-batches as ranks come before.

    So each rank has as many micro-batches in flight as the first, and the last ones' weight parts
    are left for the time in which 1F1B drains.

    Args:
        seat: The rank; has one stage.
        count: Micro-batches.
    """
    (stage,) = seat.stages
    warmup = min(seat.num_ranks - 1 - seat.rank, count)
    yield from (Action(stage, F, index) for index in range(warmup))
    for index in range(count):
        if index + warmup < count:
            yield Action(stage, F, index + warmup)
        yield Action(stage, I, index)
        if index >= seat.rank:
            yield Action(stage, W, index - seat.rank)
    yield from (Action(stage, W, index) for index in range(max(0, count - seat.rank), count))


def zbv(seat: Seat, count: int) -> Iterator[Action]:
    """Runs down one arm of the V and up the other.

    Args:
        seat: The rank; has two stages.
        count: Micro-batches.
    """
    # A pipeline that is never full is one that is, without the micro-batches that are not there.
    full = max(2 * seat.num_ranks - 1, count)
    return (action for action in _full_vee(seat, full) if action.microbatch_index < count)


def _full_vee(seat: Seat, count: int) -> Iterator[Action]:
    down, up = (_Arm(stage) for stage in seat.stages)
    before, behind = seat.rank, seat.num_ranks - seat.rank  # `behind` counts this rank too
    for _ in range(2 * behind - 1):
        yield down.next(F)
    for _ in range(before):
        yield up.next(F)
        yield down.next(F)
    for _ in range(behind):
        yield from (up.next(F), up.next(I), up.next(W))
    while up.done(F) < count:
        if down.done(F) < count:
            yield down.next(F)
        yield from (down.next(I), down.next(W))
        yield from (up.next(F), up.next(I), up.next(W))
    for _ in range(before):
        yield from (down.next(I), up.next(I))
    for _ in range(behind):
        yield from (down.next(I), down.next(W))
    for arm in (up, down):
        yield from (arm.next(W) for _ in range(count - arm.done(W)))


class _Arm:
    """One stage, whose micro-batches come in their order."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._done = dict.fromkeys((F, I, W), 0)

    def next(self, kind: ActionKind) -> Action:
        index = self._done[kind]
        self._done[kind] += 1
        return Action(self._stage, kind, index)

    def done(self, kind: ActionKind) -> int:
        return self._done[kind]
