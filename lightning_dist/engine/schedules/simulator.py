"""Predict a timeline from a schedule and the costs of its stages.

The simulator plays the same dependencies as validation (:func:`.play`). Each action starts at
the first moment at which its rank is free and its data has arrived.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.schedule import Schedule, play
from lightning_dist.engine.schedules.timeline import Span, SpanKind, Timeline

_UNKNOWN = float("inf")


@dataclass(frozen=True, slots=True)
class StageCosts:
    """The durations of a pipeline's actions.

    Attributes:
        forward_seconds: Time of one micro-batch's forward, by stage.
        backward_seconds: Time of one micro-batch's full backward, by stage.
        transfer_seconds: Time from a send until the receive on another rank can end.
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
        forwards, backwards = (forward_seconds,) * num_stages, (backward_seconds,) * num_stages
        return cls(forwards, backwards, transfer_seconds, update_seconds)

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
    homes = schedule.rank_of_stage

    def arrival(source: Action, target: Action) -> float:
        crosses = homes[source.stage_index] != homes[target.stage_index]
        return end[source] + (costs.transfer_seconds if crosses else 0.0)

    for rank, action, needed in play(schedule):
        begin = free[rank]
        ready = max((arrival(other, action) for other in needed), default=0.0)
        start = begin if action.kind.is_receive else max(begin, ready)
        finish = max(begin, ready) + costs.duration_seconds(action)
        end[action] = free[rank] = finish
        if finish > start:
            spans.append(Span(rank, _span_kind(action), action, start, finish))
    return Timeline(len(schedule.ranks), tuple(spans))


def makespan_seconds(schedule: Schedule, costs: StageCosts) -> float:
    """Returns the end of :func:`simulate`, many times as fast, for a search of many schedules.

    These must be valid, and of compute actions only.
    """
    homes, count = schedule.rank_of_stage, schedule.num_microbatches
    hops = [costs.transfer_seconds if here != there else 0.0 for here, there in pairwise(homes)]
    # When the activations and gradients of micro-batches reach a stage; infinite while unknown.
    activations = [[0.0] * count] + [[_UNKNOWN] * count for _ in hops]
    gradients = [[_UNKNOWN] * count for _ in hops] + [[0.0] * count]
    ends = []

    def run(actions: Sequence[Action]) -> Iterator[bool]:
        now = 0.0
        for action in actions:
            stage, kind, index = action.stage_index, action.kind, action.microbatch_index
            if kind is ActionKind.BACKWARD_WEIGHT:
                now += (1.0 - costs.input_share) * costs.backward_seconds[stage]
                continue
            arrivals = activations if kind is ActionKind.FORWARD else gradients
            while (ready := arrivals[stage][index]) == _UNKNOWN:
                yield True
            now = ready if ready > now else now
            if kind is ActionKind.FORWARD:
                now += costs.forward_seconds[stage]
                if stage < len(hops):
                    activations[stage + 1][index] = now + hops[stage]
            else:
                share = 1.0 if kind is ActionKind.BACKWARD else costs.input_share
                now += share * costs.backward_seconds[stage]
                if stage > 0:
                    gradients[stage - 1][index] = now + hops[stage - 1]
        ends.append(now)

    runs = [run(actions) for actions in schedule.ranks]
    while runs:
        runs = [own for own in runs if next(own, False)]
    return max(ends)


def _span_kind(action: Action) -> SpanKind:
    if action.kind.is_compute:
        return SpanKind.COMPUTE
    return SpanKind.WAIT if action.kind.is_receive else SpanKind.UPDATE
