"""Passes that complete a schedule of compute actions: communication, reduction, updates.

A generator of a schedule yields compute actions only. Their receives, sends and updates follow from
the compute actions and are added here, once for all schedules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.schedule import Schedule


def lower(schedule: Schedule) -> Schedule:
    """Returns a schedule of compute actions with the actions of all passes."""
    return add_communication(add_updates(schedule))


def add_communication(schedule: Schedule) -> Schedule:
    """Adds a receive before each action that needs another stage's data, and a send after it."""
    last = schedule.num_stages - 1

    def expand(action: Action) -> Iterator[Action]:
        stage = action.stage_index
        if action.kind is ActionKind.FORWARD:
            ends = (ActionKind.RECV_F, stage > 0, ActionKind.SEND_F, stage < last)
        elif action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
            ends = (ActionKind.RECV_B, stage < last, ActionKind.SEND_B, stage > 0)
        else:
            yield action
            return
        receive, has_source, send, has_target = ends
        if has_source:
            yield Action(stage, receive, action.microbatch_index)
        yield action
        if has_target:
            yield Action(stage, send, action.microbatch_index)

    ranks = tuple(
        tuple(new for action in actions for new in expand(action)) for actions in schedule.ranks
    )
    return replace(schedule, ranks=ranks)


def add_updates(schedule: Schedule) -> Schedule:
    """Adds reductions and updates to compute actions; an evaluation schedule stays unchanged."""
    if not any(a.kind.ends_backward for actions in schedule.ranks for a in actions):
        return schedule
    rule, sizes = schedule.update_rule, (len(schedule.ranks), schedule.microbatches_per_update)
    ranks = (
        tuple(rule.add_updates(actions, rank, *sizes))
        for rank, actions in enumerate(schedule.ranks)
    )
    return replace(schedule, ranks=tuple(ranks))
