"""One rank's actions for each batch: training, another batch size, evaluation, drain.

For a synchronous schedule a round is the whole schedule. An asynchronous schedule is not flushed
between batches. Its round k has a rank's actions from the first forward of batch k until before the
next batch's. The remaining actions are the drain. Rounds are cut out of generated schedules. A
steady round is the same for each k but for the indices, so a short schedule holds them all.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, takewhile

from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.family import ScheduleFamily
from lightning_dist.engine.schedules.registry import PipelineShape, build_forward_schedule
from lightning_dist.engine.schedules.schedule import lower

Round = tuple[Action, ...]
_OF_UPDATES = (ActionKind.REDUCE_GRAD, ActionKind.STEP)


class Stream:
    """One rank's actions, batch by batch.

    Raises:
        ValueError: The family takes each batch whole.
    """

    def __init__(
        self,
        family: ScheduleFamily,
        rank_of_stage: tuple[int, ...],
        *,
        num_microbatches: int,
        rank: int,
    ) -> None:
        num_ranks = 1 + max(rank_of_stage)
        rule = family.update_rule
        self.asynchronous = rule.is_asynchronous
        self.delay = rule.delay(rank, num_ranks, num_microbatches)
        if not rule.splits_batches and num_microbatches != 1:
            raise ValueError(
                f"num_microbatches={num_microbatches}: {family.name!r} takes each batch as one"
                " micro-batch."
            )
        self._family = family
        self._rank_of_stage = rank_of_stage
        self._num_microbatches = num_microbatches
        self._rank = rank
        if self.asynchronous:
            # One batch more than needed, so that the last round is not followed by the tail.
            actions = self._actions(self.delay + 2)
            self._rounds = _before_each_batch(actions, num_microbatches)
        else:
            self._rounds = (self._actions(1),)

    def round(self, batch_index: int) -> Round:
        """Returns the round of a batch, counted since the last drain."""
        if not self.asynchronous:
            return self._rounds[0]
        known = min(batch_index, self.delay)
        return self._shifted(self._rounds[known], batch_index - known)

    def drain(self, num_batches: int) -> tuple[Round, ...]:
        """Returns the rounds that remain after some batches; each ends in an update."""
        if not self.asynchronous or num_batches == 0:
            return ()
        length = min(num_batches, self.delay + 1)
        done = sum(len(self.round(index)) for index in range(length))
        tail = self._actions(length)[done:]
        return tuple(self._shifted(r, num_batches - length) for r in _after_each_step(tail))

    def _actions(self, num_batches: int) -> Round:
        sizes = self._num_microbatches, num_batches
        schedule = self._family.build(self._rank_of_stage, *sizes, only_rank=self._rank)
        return lower(schedule).ranks[self._rank]

    def _shifted(self, actions: Round, num_batches: int) -> Round:
        def shifted(action: Action) -> Action:
            size = 1 if action.kind in _OF_UPDATES else self._num_microbatches
            return action.shifted(num_batches * size)

        return tuple(shifted(action) for action in actions)


def _before_each_batch(actions: Round, num_microbatches: int) -> tuple[Round, ...]:
    starts = [
        place - (place > 0 and actions[place - 1].kind is ActionKind.RECV_F)
        for place, action in enumerate(actions)
        if action.kind is ActionKind.FORWARD and action.microbatch_index % num_microbatches == 0
    ]
    return tuple(actions[start:end] for start, end in pairwise(starts))


def _after_each_step(actions: Round) -> tuple[Round, ...]:
    ends = [place + 1 for place, a in enumerate(actions) if a.kind is ActionKind.STEP]
    return tuple(actions[start:end] for start, end in pairwise([0, *ends]))


class Rounds:
    """One rank's rounds of actions.

    Attributes:
        update_rule: The meaning of the schedule's update.
        asynchronous: Whether batches overlap, so that gradients come later than their batch.
        delay: Batches between a batch and its gradients on this rank.
        lag: Number of batches by which the first rank may be ahead of the last rank's results.

    Raises:
        ValueError: The schedule does not fit the sizes.
    """

    def __init__(self, shape: PipelineShape) -> None:
        self._shape = shape
        self._family = shape.family
        self._family.check_microbatches(shape.num_ranks, shape.num_microbatches)
        self._stream = self._stream_of(shape.num_microbatches)
        self._streams = {shape.num_microbatches: self._stream}
        self._forward: dict[int, Round] = {}
        self.update_rule = self._family.update_rule
        self.asynchronous, self.delay = self._stream.asynchronous, self._stream.delay
        self.lag = self.update_rule.lag(shape.num_ranks, shape.num_microbatches)

    def num_pieces(self, batch_size: int | None) -> int:
        """Returns the number of micro-batches into which a batch of some samples is cut.

        Under a synchronous schedule a batch of fewer samples than micro-batches, as an epoch's last
        one, is cut into fewer.
        """
        count = self._shape.num_microbatches
        is_fixed = not self._shape.keeps_pairs and (batch_size is None or batch_size >= count)
        if self.asynchronous or is_fixed:
            return count
        return self._family.microbatches_of(self._shape.num_ranks, batch_size or 1, count)

    def training(self, batch_index: int, num_microbatches: int) -> Round:
        """Returns the round of a training batch, counted since the last drain.

        The number of micro-batches may differ from the shape's under a synchronous schedule only.
        """
        if num_microbatches not in self._streams:
            assert not self.asynchronous
            self._streams[num_microbatches] = self._stream_of(num_microbatches)
        return self._streams[num_microbatches].round(batch_index)

    def evaluation(self, num_microbatches: int) -> Round:
        """Returns the round of an evaluated batch of some micro-batches."""
        if num_microbatches not in self._forward:
            homes, rank = self._shape.rank_of_stage, self._shape.rank
            schedule = build_forward_schedule(homes, num_microbatches, only_rank=rank)
            self._forward[num_microbatches] = lower(schedule).ranks[rank]
        return self._forward[num_microbatches]

    def drain(self, num_batches: int) -> tuple[Round, ...]:
        """Returns the rounds that remain after some batches since the last drain."""
        return self._stream.drain(num_batches)

    def split(self, actions: Round) -> tuple[Round, Round, Round]:
        """Splits a round by whether other ranks wait for the actions.

        Returns:
            The actions up to the last send and forward; the rest of this rank's, namely weights'
            parts of backwards, often none; and those of the optimizer's owner.
        """
        early = self.update_rule.completes_early
        kinds = {ActionKind.STEP} if early else {ActionKind.REDUCE_GRAD, ActionKind.STEP}
        end = len(actions) - _num_at_the_end(actions, lambda action: action.kind in kinds)
        rest = _num_at_the_end(
            actions[:end], lambda a: not a.kind.is_send and a.kind is not ActionKind.FORWARD
        )
        return actions[: end - rest], actions[end - rest : end], actions[end:]

    def _stream_of(self, count: int) -> Stream:
        homes, rank = self._shape.rank_of_stage, self._shape.rank
        return Stream(self._family, homes, num_microbatches=count, rank=rank)


def _num_at_the_end(actions: Round, condition: Callable[[Action], bool]) -> int:
    return sum(1 for _ in takewhile(condition, reversed(actions)))
