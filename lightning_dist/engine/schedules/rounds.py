"""What one rank does for each batch that comes: training, another size, evaluation, drain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.lowering import lower
from lightning_dist.engine.schedules.schedule import Schedule, UpdateRule
from lightning_dist.engine.schedules.schedules import build_forward_schedule, find_schedules
from lightning_dist.engine.schedules.shape import PipelineShape
from lightning_dist.engine.schedules.stream import Round, Stream


@dataclass(frozen=True, slots=True)
class PartedRound:
    """A round by who waits for what is done.

    Attributes:
        awaited: Up to what a rank behind or before waits for, and the last forward.
        alone: What then is left to this rank: weights' parts of backwards, most often nothing.
        owned: What the owner of the optimizer does.
    """

    awaited: Round
    alone: Round
    owned: Round


class Rounds:
    """One rank's rounds of actions.

    Args:
        shape: Which part of which pipeline this is.

    Raises:
        ValueError: The schedule does not go with the sizes.
    """

    def __init__(self, shape: PipelineShape) -> None:
        self._shape = shape
        self._schedules = find_schedules(shape.schedule)
        self._stream = self._stream_of(shape.num_microbatches)
        self._other: dict[int, Round] = {}
        self._forward: dict[int, Round] = {}

    @property
    def update_rule(self) -> UpdateRule:
        """When gradients are applied."""
        return self._schedules.update_rule

    @property
    def asynchronous(self) -> bool:
        """Whether batches overlap, so that gradients come later than their batch."""
        return self._stream.asynchronous

    @property
    def delay(self) -> int:
        """Batches between a batch and its gradients on this rank."""
        return self._stream.delay

    @property
    def lag(self) -> int:
        """By how many batches the first rank may be ahead of what the last one knows."""
        return {
            UpdateRule.FLUSHED: 0,
            UpdateRule.EACH: self._shape.num_ranks - 1,
            UpdateRule.LATE: 1,
        }[self.update_rule]

    def num_pieces(self, batch_size: int) -> int:
        """Says into how many micro-batches a training batch is cut.

        Args:
            batch_size: Its samples.
        """
        count = self._shape.num_microbatches
        if not self._shape.may_use_fewer:
            return count
        return self._schedules.most_microbatches(self._shape.num_ranks, min(count, batch_size))

    def training(self, batch_index: int, num_microbatches: int) -> Round:
        """Gives what to do with a training batch.

        Args:
            batch_index: Counted since the last drain.
            num_microbatches: Its pieces; other than usual only under a synchronous schedule.
        """
        if num_microbatches == self._shape.num_microbatches:
            return self._stream.round(batch_index)
        assert not self.asynchronous
        if num_microbatches not in self._other:
            self._other[num_microbatches] = self._stream_of(num_microbatches).round(0)
        return self._other[num_microbatches]

    def evaluation(self, num_microbatches: int) -> Round:
        """Gives what to do with a batch that is evaluated.

        Args:
            num_microbatches: Its pieces.
        """
        if num_microbatches not in self._forward:
            schedule = build_forward_schedule(self._shape.rank_of_stage, num_microbatches)
            self._forward[num_microbatches] = lower(schedule).ranks[self._shape.rank]
        return self._forward[num_microbatches]

    def drain(self, num_batches: int) -> tuple[Round, ...]:
        """Gives what remains to be done after some batches.

        Args:
            num_batches: Rounds done since the last drain.
        """
        return self._stream.drain(num_batches)

    def parted(self, actions: Round) -> PartedRound:
        """Parts a round by who waits for what is done.

        Args:
            actions: The round.
        """
        # Of a late update the gradients are complete long before it is due.
        late = self.update_rule is UpdateRule.LATE
        kinds = {ActionKind.STEP} if late else {ActionKind.REDUCE_GRAD, ActionKind.STEP}
        end = len(actions) - _num_at_the_end(actions, lambda action: action.kind in kinds)
        rest = _num_at_the_end(actions[:end], lambda action: not _is_awaited(action))
        return PartedRound(actions[: end - rest], actions[end - rest : end], actions[end:])

    def drawn(self) -> Schedule:
        """Gives the schedule that errors draw, of some batches where they overlap."""
        homes, count = self._shape.rank_of_stage, self._shape.num_microbatches
        num_batches = 1 + 2 * self._shape.num_stages // count if self.asynchronous else 1
        return self._schedules.build(homes, count, num_batches)

    def _stream_of(self, num_microbatches: int) -> Stream:
        return Stream(
            self._schedules,
            self._shape.rank_of_stage,
            num_microbatches=num_microbatches,
            rank=self._shape.rank,
        )


def _is_awaited(action: Action) -> bool:
    return action.kind.is_send or action.kind is ActionKind.FORWARD


def _num_at_the_end(actions: Round, condition: Callable[[Action], bool]) -> int:
    return sum(1 for _ in takewhile(condition, reversed(actions)))
