"""Passes that complete a schedule of compute actions: communication, reduction, updates.

A generator says when a stage computes; that an activation has to be there before, and an update
comes after, follows from it and is added here, once for all schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from lightning_dist.pipeline.actions import Action, ActionKind
from lightning_dist.pipeline.schedule import Schedule

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


def lower(schedule: Schedule) -> Schedule:
    """Applies all passes in their order.

    Args:
        schedule: Compute actions only.
    """
    return add_updates(add_communication(schedule))


def add_communication(schedule: Schedule) -> Schedule:
    """Puts a receive before each action that needs a neighbour's data, and a send after it.

    Args:
        schedule: Compute actions only.
    """
    last = schedule.num_stages - 1

    def expand(action: Action) -> Iterator[Action]:
        stage, index = action.stage_index, action.microbatch_index
        receives = {F: (ActionKind.RECV_F, stage > 0), B: (ActionKind.RECV_B, stage < last)}
        sends = {F: (ActionKind.SEND_F, stage < last), B: (ActionKind.SEND_B, stage > 0)}
        receive, has_source = receives[action.kind]
        send, has_target = sends[action.kind]
        if has_source:
            yield Action(stage, receive, index)
        yield action
        if has_target:
            yield Action(stage, send, index)

    return _expand(schedule, expand)


def add_updates(schedule: Schedule) -> Schedule:
    """Puts a reduction and an update after the gradients are complete.

    For a synchronous schedule that is the end; for an asynchronous one, each backward. An
    evaluation schedule stays as it is.

    Args:
        schedule: With communication.
    """
    has_backward = any(a.kind is B for actions in schedule.ranks for a in actions)
    if not has_backward:
        return schedule
    if not schedule.asynchronous:
        ranks = tuple(
            (*actions, *_update(actions[-1].stage_index, 0)) for actions in schedule.ranks
        )
        return replace(schedule, ranks=ranks)

    def expand(action: Action) -> Iterator[Action]:
        yield action
        completes = ActionKind.SEND_B if action.stage_index > 0 else B
        if action.kind is completes:
            yield from _update(action.stage_index, action.microbatch_index)

    return _expand(schedule, expand)


def _update(stage: int, index: int) -> tuple[Action, Action]:
    return Action(stage, ActionKind.REDUCE_GRAD, index), Action(stage, ActionKind.STEP, index)


def _expand(schedule: Schedule, expand: Callable[[Action], Iterator[Action]]) -> Schedule:
    ranks = tuple(
        tuple(new for action in actions for new in expand(action)) for actions in schedule.ranks
    )
    return replace(schedule, ranks=ranks)
