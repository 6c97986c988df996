"""A schedule is data: for each rank the order of its actions, and nothing else.

Whether a schedule is valid can be decided without running it. :func:`play` plays the actions by
their dependencies. Validation asks whether all actions were possible, and the simulator asks when.
So a schedule is valid exactly if it can be simulated. :func:`lower` adds communication and updates
to compute actions.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from itertools import chain, islice
from types import MappingProxyType

from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.update_rule import FLUSHED, UpdateRule

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT  # noqa: E741
# What an action needs: how many stages further on, and the kind of action there.
_SOURCES: Mapping[ActionKind, tuple[int, ActionKind]] = MappingProxyType(
    {
        W: (0, I),
        ActionKind.SEND_F: (0, F),
        ActionKind.RECV_F: (-1, ActionKind.SEND_F),
        ActionKind.RECV_B: (1, ActionKind.SEND_B),
    }
)
_MOST_NAMED = 8  # one number too large in a file would make millions of others missing


class ScheduleError(ValueError):
    """A schedule that cannot be executed."""


@dataclass(frozen=True)
class Schedule:
    """The order of work of a pipeline.

    Attributes:
        name: Name for messages and plots.
        num_stages: Number of stages of the pipeline.
        num_microbatches: Number of micro-batches of all batches.
        ranks: The actions of each rank in order.
        update_rule: The meaning of an update.
        num_batches: Number of batches between two drains, if each has several micro-batches.
    """

    name: str
    num_stages: int
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    update_rule: UpdateRule = FLUSHED
    num_batches: int = 1

    @property
    def microbatches_per_update(self) -> int:
        """Number of micro-batches whose gradients are applied together."""
        return self.num_microbatches // self.num_batches if self.update_rule.splits_batches else 1

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The rank of each stage."""
        homes = {a.stage_index: rank for rank, actions in enumerate(self.ranks) for a in actions}
        return tuple(homes[stage] for stage in range(self.num_stages))

    def validate(self) -> Schedule:
        """Checks the schedule and returns it.

        Raises:
            ScheduleError: An action is missing, doubled, on several ranks or impossible, or ranks
                wait for each other; the message names the actions.
        """
        self._check_ranges()
        self._check_counts()
        for _ in play(self):
            pass
        return self

    def in_flight(self, rank: int, stage: int | None = None) -> int:
        """Counts the most micro-batches with their forward done and their backward not.

        Args:
            rank: The rank; a micro-batch in flight on two of its stages counts twice.
            stage: One of the rank's stages; None for all.
        """
        present = peak = 0
        for action in self.ranks[rank]:
            if stage in (None, action.stage_index):
                present += (action.kind is F) - action.kind.ends_backward
                peak = max(peak, present)
        return peak

    def _check_ranges(self) -> None:
        rank_of_stage: dict[int, int] = {}
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                stage, index = action.stage_index, action.microbatch_index
                if not (0 <= stage < self.num_stages and 0 <= index < self.num_microbatches):
                    raise ScheduleError(
                        f"Action {action} on rank {rank} is impossible: the schedule {self.name!r}"
                        f" has stages 0 to {self.num_stages - 1} and micro-batches 0 to"
                        f" {self.num_microbatches - 1}."
                    )
                home = rank_of_stage.setdefault(stage, rank)
                if home != rank:
                    raise ScheduleError(
                        f"Action {action} is on rank {rank}, but other actions of stage {stage} are"
                        f" on rank {home}. A stage lives on one rank."
                    )

    def _check_counts(self) -> None:
        counts = Counter(action for actions in self.ranks for action in actions)
        doubled = [str(action) for action, count in counts.items() if count > 1]
        if doubled:
            raise ScheduleError(f"Schedule {self.name!r} has doubled actions: {doubled}.")
        trains = any(action.kind in (B, I, W) for action in counts)
        missing = (
            action
            for stage in range(self.num_stages)
            for index in range(self.num_microbatches)
            for action in _missing(stage, index, counts, trains)
        )
        named = [str(action) for action in islice(missing, _MOST_NAMED)]
        if named:
            more = " and more" if next(missing, None) is not None else ""
            raise ScheduleError(
                f"Schedule {self.name!r} misses actions: {named}{more}. It has stages 0 to"
                f" {self.num_stages - 1} and micro-batches 0 to {self.num_microbatches - 1}."
            )
        both = [str(a) for a in counts if a.kind is B and replace(a, kind=I) in counts]
        if both:
            raise ScheduleError(
                f"Schedule {self.name!r} has whole backwards {both} of what it also parts in two."
            )

    def format_grid(self, mark: Action | None = None, max_columns: int = 40) -> str:
        """Draws the compute actions as a table, a row per rank and a column per time slot.

        Args:
            mark: Action to put between ``>`` and ``<``; a send or receive marks what it belongs to.
            max_columns: Largest number of slots to draw, around the mark.
        """
        slots = self._slots()
        marked = None if mark is None else self._compute_action_of(mark)
        width = 1 + max((slot for row in slots for slot in row), default=0)
        place = next((s for row in slots for s, a in row.items() if a == marked), 0)
        first = min(max(0, place - max_columns // 2), max(0, width - max_columns))
        columns = range(first, min(width, first + max_columns))

        shares_ranks = len(self.ranks) < self.num_stages

        def text(row: dict[int, Action], slot: int) -> str:
            action = row.get(slot)
            if action is None:
                return "."
            # With one stage per rank, a row's number is its stage's.
            short = str(action) if shares_ranks else f"{action.kind.value}{action.microbatch_index}"
            return f">{short}<" if action == marked else short

        cells = [[text(row, slot) for slot in columns] for row in slots]
        size = max((len(cell) for row in cells for cell in row), default=1)
        lines = [
            f"rank {rank:>2}  " + " ".join(cell.center(size) for cell in row).rstrip()
            for rank, row in enumerate(cells)
        ]
        if len(columns) < width:
            lines.append(f"(slots {columns.start} to {columns.stop - 1} of {width})")
        return "\n".join(lines)

    def _compute_action_of(self, action: Action) -> Action:
        forward = action.kind in (F, ActionKind.SEND_F, ActionKind.RECV_F)
        whole = replace(action, kind=F if forward else B)
        split = replace(action, kind=W if action.kind is W else I)
        present = {a for actions in self.ranks for a in actions}
        return split if whole not in present and split in present else whole

    def _slots(self) -> list[dict[int, Action]]:
        """Places each compute action in the first unit of time in which it can be done."""
        end: dict[Action, int] = {}
        free = [0] * len(self.ranks)
        rows: list[dict[int, Action]] = [{} for _ in self.ranks]
        for rank, action, needed in play(self):
            start = max([free[rank], *(end[other] for other in needed)])
            length = int(action.kind.is_compute)
            if length:
                rows[rank][start] = action
            end[action] = free[rank] = start + length
        return rows


def lower(schedule: Schedule) -> Schedule:
    """Completes a schedule of compute actions.

    Orders of work have compute actions only. What follows from these is added here, once for all
    schedules: a receive before an action that needs another stage's data, a send after it, and
    reductions and updates, if there are backwards.

    A stage receives in the order in which its neighbour sends, so earlier than it computes where
    that order is another. Messages that travel point to point come in no other order.
    """
    last = schedule.num_stages - 1
    sent = _orders_of_sends(schedule)
    rule, sizes = schedule.update_rule, (len(schedule.ranks), schedule.microbatches_per_update)
    trains = any(a.kind.ends_backward for actions in schedule.ranks for a in actions)

    def with_communication(actions: Iterable[Action]) -> Iterator[Action]:
        for action in actions:
            stage, index = action.stage_index, action.microbatch_index
            if action.kind is F:
                ends = (ActionKind.RECV_F, stage > 0, ActionKind.SEND_F, stage < last)
            elif action.kind in (B, I):
                ends = (ActionKind.RECV_B, stage < last, ActionKind.SEND_B, stage > 0)
            else:
                yield action
                continue
            receive, has_source, send, has_target = ends
            if has_source:
                # Without the neighbour's actions, as of one rank alone, this rank's order is both.
                order = sent.get((stage, receive), deque([index]))
                if index in order:  # else it is received already
                    while (earlier := order.popleft()) != index:
                        yield Action(stage, receive, earlier)
                    yield Action(stage, receive, index)
            yield action
            if has_target:
                yield Action(stage, send, index)

    ranks = tuple(
        tuple(with_communication(rule.add_updates(own, rank, *sizes) if trains else own))
        for rank, own in enumerate(schedule.ranks)
    )
    return replace(schedule, ranks=ranks)


def _orders_of_sends(schedule: Schedule) -> dict[tuple[int, ActionKind], deque[int]]:
    """Returns what each stage receives of each kind, as micro-batches in the order of the sends."""
    orders: defaultdict[tuple[int, ActionKind], deque[int]] = defaultdict(deque)
    for action in chain.from_iterable(schedule.ranks):
        if action.kind is F:
            orders[action.stage_index + 1, ActionKind.RECV_F].append(action.microbatch_index)
        elif action.kind in (B, I):
            orders[action.stage_index - 1, ActionKind.RECV_B].append(action.microbatch_index)
    return orders


def play(schedule: Schedule) -> Iterator[tuple[int, Action, tuple[Action, ...]]]:
    """Yields rank, action and the actions it depends on, in an order that respects these.

    Raises:
        ScheduleError: A rank cannot finish; the message names the actions it waits for.
    """
    present = {action for actions in schedule.ranks for action in actions}
    left = [deque(actions) for actions in schedule.ranks]
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}
    ready = list(range(len(left)))
    while ready:
        rank = ready.pop()
        while left[rank]:
            action = left[rank][0]
            needed = _needs(action, present, schedule.num_stages)
            blocker = next((other for other in needed if other not in done), None)
            if blocker is not None:
                waiting.setdefault(blocker, []).append(rank)
                break
            left[rank].popleft()
            done.add(action)
            ready.extend(waiting.pop(action, ()))
            yield rank, action, needed
    stuck = []
    for rank, actions in enumerate(left):
        if actions:
            needed = _needs(actions[0], present, schedule.num_stages)
            missing = ", ".join(str(other) for other in needed if other not in done)
            stuck.append(f"rank {rank} waits with {actions[0]} for {missing}")
    if stuck:
        raise ScheduleError(f"Schedule {schedule.name!r} deadlocks: {'; '.join(stuck)}.")


def _needs(action: Action, present: Set[Action], num_stages: int) -> tuple[Action, ...]:
    """Returns the actions that must be done before an action, on its stage and a neighbour."""
    stage, index = action.stage_index, action.microbatch_index

    def at(other_stage: int, kind: ActionKind) -> Action:
        return Action(other_stage, kind, index)

    def backward_of(other_stage: int) -> Action:
        split = at(other_stage, I)
        return split if split in present else at(other_stage, B)

    if action.kind is F:
        if stage == 0:
            return ()
        received = at(stage, ActionKind.RECV_F)
        return (received,) if received in present else (at(stage - 1, F),)
    if action.kind in (B, I):
        own = at(stage, F)
        if stage == num_stages - 1:
            return (own,)
        received = at(stage, ActionKind.RECV_B)
        return (own, received if received in present else backward_of(stage + 1))
    if action.kind is ActionKind.SEND_B:
        return (backward_of(stage),)
    if action.kind not in _SOURCES:
        return ()
    offset, kind = _SOURCES[action.kind]
    return (at(stage + offset, kind),)


def _missing(
    stage: int, index: int, present: Mapping[Action, int], trains: bool
) -> Iterator[Action]:
    def absent(*kinds: ActionKind) -> list[Action]:
        actions = (Action(stage, kind, index) for kind in kinds)
        return [action for action in actions if action not in present]

    yield from absent(F)
    if trains and len(parts := absent(I, W)) > 0 and absent(B):
        yield from parts if len(parts) == 1 else absent(B)
