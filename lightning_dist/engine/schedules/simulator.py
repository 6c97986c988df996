"""Predict a timeline from a schedule and the costs of its stages.

The simulator plays the same dependencies as validation (:class:`.Execution`). Each action starts at
the first moment at which its rank is free and its data has arrived.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.schedule import Execution, Schedule
from lightning_dist.engine.schedules.timeline import Span, SpanKind, Timeline


@dataclass(frozen=True, slots=True)
class StageCosts:
    """The durations of a pipeline's actions.

    Attributes:
        forward_seconds: Time of one micro-batch's forward, by stage.
        backward_seconds: Time of one micro-batch's full backward, by stage.
        transfer_seconds: Time from a send until its receive can end.
        update_seconds: Time of one optimizer update.
        input_share: Share of the inputs' gradients in a backward's time, if a schedule splits the
            backward; the weights' gradients take the rest.
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    transfer_seconds: float = 0.0
    update_seconds: float = 0.0
    input_share: float = 0.5

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward_seconds: float = 1.0,
        backward_seconds: float = 2.0,
        transfer_seconds: float = 0.0,
        update_seconds: float = 0.0,
    ) -> StageCosts:
        """Creates the costs of ``num_stages`` equal stages, from the times of each."""
        return cls(
            forward_seconds=(forward_seconds,) * num_stages,
            backward_seconds=(backward_seconds,) * num_stages,
            transfer_seconds=transfer_seconds,
            update_seconds=update_seconds,
        )

    def duration_seconds(self, action: Action) -> float:
        """Returns the time of an action on its rank; sends, receives and reductions take none."""
        if action.kind is ActionKind.FORWARD:
            return self.forward_seconds[action.stage_index]
        share = {
            ActionKind.BACKWARD: 1.0,
            ActionKind.BACKWARD_INPUT: self.input_share,
            ActionKind.BACKWARD_WEIGHT: 1.0 - self.input_share,
        }.get(action.kind)
        if share is not None:
            return share * self.backward_seconds[action.stage_index]
        return self.update_seconds if action.kind is ActionKind.STEP else 0.0


def simulate(schedule: Schedule, costs: StageCosts) -> Timeline:
    """Simulates a schedule.

    Args:
        schedule: A schedule of compute actions only, or a lowered one.
        costs: Costs with one entry per stage.

    Returns:
        A timeline that begins at zero, with a wait span where a receive waits.

    Raises:
        ValueError: The costs are of another number of stages.
        ScheduleError: The schedule deadlocks.
    """
    if not len(costs.forward_seconds) == len(costs.backward_seconds) == schedule.num_stages:
        raise ValueError(
            f"The costs are of {len(costs.forward_seconds)} forwards and"
            f" {len(costs.backward_seconds)} backwards, but the schedule has"
            f" {schedule.num_stages} stages."
        )
    end: dict[Action, float] = {}
    free = [0.0] * len(schedule.ranks)
    spans: list[Span] = []
    execution = Execution(schedule)
    homes = schedule.rank_of_stage

    def arrival(source: Action, target: Action) -> float:
        crosses = homes[source.stage_index] != homes[target.stage_index]
        return end[source] + (costs.transfer_seconds if crosses else 0.0)

    for rank, action, needed in execution.run():
        begin = free[rank]
        ready = max((arrival(other, action) for other in needed), default=0.0)
        if action.kind.is_receive:
            start, finish = begin, max(begin, ready)
        else:
            start = max(begin, ready)
            finish = start + costs.duration_seconds(action)
        end[action] = free[rank] = finish
        if finish > start:
            spans.append(Span(rank, _span_kind(action), action, start, finish))
    execution.raise_if_stuck()
    return Timeline(len(schedule.ranks), tuple(spans))


def _span_kind(action: Action) -> SpanKind:
    if action.kind.is_compute:
        return SpanKind.COMPUTE
    return SpanKind.WAIT if action.kind.is_receive else SpanKind.UPDATE
