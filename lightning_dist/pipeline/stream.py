"""A schedule is finite, training is not: cut an endless schedule into one round per batch.

Lightning hands over one batch at a time and does not say which is the last. For a synchronous
schedule a round is the whole schedule. An asynchronous one is not flushed between batches: round k
is what a rank does from the forward of batch k until before the next one, and what then remains is
the drain.

The rounds are cut out of generated schedules, so there is no second description of their order. The
order of a rank for N minibatches is a prefix of fills and steady rounds and a tail of backwards; a
steady round is the same for each k but for the indices, so a short schedule holds them all.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dist.pipeline.actions import Action, ActionKind
from lightning_dist.pipeline.lowering import lower
from lightning_dist.pipeline.schedules import FAMILIES, build_schedule

Round = tuple[Action, ...]


class Stream:
    """One rank's actions, batch by batch.

    Args:
        name: Of the schedule.
        num_stages: Stages of the pipeline.
        num_microbatches: Micro-batches per batch; 1 for an asynchronous schedule.
        rank: The rank.

    Raises:
        ValueError: More than one micro-batch for an asynchronous schedule.
    """

    def __init__(self, name: str, *, num_stages: int, num_microbatches: int, rank: int) -> None:
        self.asynchronous = FAMILIES[name].asynchronous
        if self.asynchronous and num_microbatches != 1:
            raise ValueError(
                f"num_microbatches={num_microbatches}: {name!r} takes each batch as one"
                " micro-batch."
            )
        self.delay = num_stages - 1 - rank if self.asynchronous else 0
        self._name = name
        self._num_stages = num_stages
        self._num_microbatches = num_microbatches
        self._rank = rank
        self._first_steady = self.delay
        self._rounds = self._cut_rounds()

    def round(self, batch_index: int) -> Round:
        """Gives what to do with a batch.

        Args:
            batch_index: Counted since the last drain.
        """
        if not self.asynchronous:
            return self._rounds[0]
        known = min(batch_index, self._first_steady)
        return _shifted(self._rounds[known], batch_index - known)

    def drain(self, num_batches: int) -> tuple[Round, ...]:
        """Gives what remains to be done after some batches.

        Args:
            num_batches: Rounds done since the last drain.

        Returns:
            Rounds that each end in an update.
        """
        if not self.asynchronous or num_batches == 0:
            return ()
        length = min(num_batches, self._first_steady + 1)
        done = sum(len(self.round(index)) for index in range(length))
        tail = self._actions(length)[done:]
        return tuple(_shifted(r, num_batches - length) for r in _after_each_step(tail))

    def _actions(self, count: int) -> Round:
        schedule = build_schedule(self._name, num_stages=self._num_stages, num_microbatches=count)
        return lower(schedule).ranks[self._rank]

    def _cut_rounds(self) -> tuple[Round, ...]:
        if not self.asynchronous:
            return (self._actions(self._num_microbatches),)
        # One more than needed, so that the last round is not followed by the tail.
        return _before_each_forward(self._actions(self._first_steady + 2))


def _before_each_forward(actions: Sequence[Action]) -> tuple[Round, ...]:
    starts = [
        place - (place > 0 and actions[place - 1].kind is ActionKind.RECV_F)
        for place, action in enumerate(actions)
        if action.kind is ActionKind.FORWARD
    ]
    return tuple(tuple(actions[start:end]) for start, end in zip(starts, starts[1:], strict=False))


def _after_each_step(actions: Sequence[Action]) -> tuple[Round, ...]:
    ends = [place + 1 for place, a in enumerate(actions) if a.kind is ActionKind.STEP]
    return tuple(tuple(actions[start:end]) for start, end in zip([0, *ends], ends, strict=False))


def _shifted(actions: Round, offset: int) -> Round:
    return tuple(action.shifted(offset) for action in actions)
