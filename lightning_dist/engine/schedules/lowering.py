"""Passes that complete a schedule of compute actions: communication, reduction, updates.

A generator of a schedule yields compute actions only. Their receives, sends and updates follow from
the compute actions and are added here, once for all schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.schedule import Schedule, UpdateRule

F = ActionKind.FORWARD
_FULL_OR_INPUT = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
_FULL_OR_WEIGHT = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)


def lower(schedule: Schedule) -> Schedule:
    """Returns a schedule with the actions of all passes.

    Args:
        schedule: A schedule of compute actions only.
    """
    return add_communication(add_updates(schedule))


def add_communication(schedule: Schedule) -> Schedule:
    """Adds a receive before each action that needs another stage's data, and a send after it.

    Stages on the same rank get the same actions.

    Args:
        schedule: A schedule without communication.
    """
    last = schedule.num_stages - 1

    def expand(action: Action) -> Iterator[Action]:
        stage = action.stage_index
        if action.kind is F:
            ends = (ActionKind.RECV_F, stage > 0, ActionKind.SEND_F, stage < last)
        elif action.kind in _FULL_OR_INPUT:
            ends = (ActionKind.RECV_B, stage < last, ActionKind.SEND_B, stage > 0)
        else:
            yield action
            return
        receive, has_source, send, has_target = ends
        if has_source:
            yield replace(action, kind=receive)
        yield action
        if has_target:
            yield replace(action, kind=send)

    return _expand(schedule, expand)


def add_updates(schedule: Schedule) -> Schedule:
    """Adds a reduction where gradients are complete, and an update where they are applied.

    An evaluation schedule is returned unchanged.

    Args:
        schedule: A schedule of compute actions only.
    """
    if not any(a.kind in _FULL_OR_WEIGHT for actions in schedule.ranks for a in actions):
        return schedule
    add = {
        UpdateRule.FLUSHED: _at_the_end,
        UpdateRule.EACH: _after_each_backward,
        UpdateRule.LATE: _after_the_next_batch,
    }[schedule.update_rule]
    return replace(schedule, ranks=tuple(tuple(add(schedule, a)) for a in schedule.ranks))


def _at_the_end(schedule: Schedule, actions: Sequence[Action]) -> Iterator[Action]:
    yield from actions
    stages = sorted({action.stage_index for action in actions})
    yield from (Action(stage, ActionKind.REDUCE_GRAD, 0) for stage in stages)
    yield from (Action(stage, ActionKind.STEP, 0) for stage in stages)


def _after_each_backward(schedule: Schedule, actions: Sequence[Action]) -> Iterator[Action]:
    for action in actions:
        yield action
        if action.kind is ActionKind.BACKWARD:
            yield replace(action, kind=ActionKind.REDUCE_GRAD)
            yield replace(action, kind=ActionKind.STEP)


def _after_the_next_batch(schedule: Schedule, actions: Sequence[Action]) -> Iterator[Action]:
    """Adds an update after the next batch's last forward and the backward paired with it.

    The gradients of the update's batch may be complete long before. But on each stage the whole
    next batch has to see the weights without the update. Meanwhile the stages have time to agree
    about all gradients of the update (their norm, say) while they work on.
    """
    size = schedule.microbatches_per_update
    forward = -1
    for action in actions:
        yield action
        if action.kind is F:
            forward = action.microbatch_index
            continue
        update, place = divmod(action.microbatch_index, size)
        if place == size - 1:
            yield Action(action.stage_index, ActionKind.REDUCE_GRAD, update)
        batch, place = divmod(forward, size)
        if place == size - 1 and batch > 0:
            yield Action(action.stage_index, ActionKind.STEP, batch - 1)
            forward = -1  # the backwards of a drain follow no forward
        if action.microbatch_index == schedule.num_microbatches - 1:
            yield Action(action.stage_index, ActionKind.STEP, update)


def _expand(schedule: Schedule, expand: Callable[[Action], Iterator[Action]]) -> Schedule:
    ranks = tuple(
        tuple(new for action in actions for new in expand(action)) for actions in schedule.ranks
    )
    return replace(schedule, ranks=ranks)
