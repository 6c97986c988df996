"""Communicators that run their operations in order cannot stand still, whatever the schedule.

On NCCL a send ends only when its receive has begun, and the operations of one communicator begin
in the order of their calls. The host does not wait. A model of that runs all ranks' actions here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.family import ScheduleFamily
from lightning_dist.engine.schedules.registry import SCHEDULE_NAMES, PipelineShape, find_family
from lightning_dist.engine.schedules.rounds import Rounds
from lightning_dist.engine.schedules.schedule import Schedule, lower
from tests.helpers.random_schedules import random_schedules

GroupOf = Callable[[int, int, tuple[int, ...]], Hashable]
"""Names the communicator of two stages, by the sending and the receiving one and all homes."""


def by_stages(sender: int, receiver: int, homes: tuple[int, ...]) -> Hashable:
    """As the channels have it: one communicator for two stages and a direction."""
    return sender, receiver


def by_ranks_and_direction(sender: int, receiver: int, homes: tuple[int, ...]) -> Hashable:
    return homes[sender], homes[receiver]


def by_ranks(sender: int, receiver: int, homes: tuple[int, ...]) -> Hashable:
    return frozenset((homes[sender], homes[receiver]))


def ends_of(action: Action) -> tuple[int, int]:
    """Returns the sending and the receiving stage of a communication."""
    stage = action.stage_index
    return {
        ActionKind.SEND_F: (stage, stage + 1),
        ActionKind.RECV_F: (stage - 1, stage),
        ActionKind.SEND_B: (stage, stage - 1),
        ActionKind.RECV_B: (stage + 1, stage),
    }[action.kind]


def find_stuck(
    programs: Sequence[Sequence[Action]], homes: tuple[int, ...], group_of: GroupOf
) -> list[str]:
    """Runs all ranks' actions; returns the first action of each rank that can never begin."""
    groups: dict[Hashable, dict[int, deque[tuple[int, Action]]]] = defaultdict(dict)
    for rank, program in enumerate(programs):
        for place, action in enumerate(program):
            if action.kind.is_send or action.kind.is_receive:
                sender, receiver = ends_of(action)
                if homes[sender] != homes[receiver]:
                    group = groups[group_of(sender, receiver, homes)]
                    group.setdefault(rank, deque()).append((place, action))
    waits = {
        (rank, place)
        for group in groups.values()
        for rank, queue in group.items()
        for place, action in queue
        if action.kind.is_receive
    }
    computed = [0] * len(programs)  # actions of each rank that its computing has passed
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while computed[rank] < len(program) and (rank, computed[rank]) not in waits:
                computed[rank] += 1
                moved = True
        for group in groups.values():
            while transfer(group, computed, waits):
                moved = True
    return [
        str(program[done])
        for program, done in zip(programs, computed, strict=True)
        if done < len(program)
    ]


def transfer(
    group: dict[int, deque[tuple[int, Action]]],
    computed: Sequence[int],
    waits: set[tuple[int, int]],
) -> bool:
    """Ends the first operations of a communicator's two ranks, if they belong together."""
    if len(group) < 2 or not all(group.values()):
        return False
    heads = [(rank, *queue[0]) for rank, queue in group.items()]
    sent = [head for head in heads if head[2].kind.is_send]
    received = [head for head in heads if head[2].kind.is_receive]
    if not sent or not received:
        return False
    (source, place, send), (target, waiting, receive) = sent[0], received[0]
    same = ends_of(send) == ends_of(receive) and send.microbatch_index == receive.microbatch_index
    if not same or computed[source] <= place:
        return False
    waits.discard((target, waiting))
    for queue in group.values():
        queue.popleft()
    return True


def programs_of(
    name: str, num_ranks: int, per_rank: int, count: int, batches: Sequence[int], *, evaluates: bool
) -> tuple[list[list[Action]], tuple[int, ...]]:
    """Returns each rank's actions for some epochs of some batches, and the stages' ranks."""
    layers = (1,) * (num_ranks * per_rank)
    shapes = [PipelineShape(name, count, layers, rank, per_rank) for rank in range(num_ranks)]
    return [list(actions(shape, count, batches, evaluates)) for shape in shapes], shapes[
        0
    ].rank_of_stage


def actions(
    shape: PipelineShape, count: int, batches: Sequence[int], evaluates: bool
) -> Iterator[Action]:
    rounds = Rounds(shape)
    for num_batches in batches:
        for batch in range(num_batches):
            yield from rounds.training(batch, count)
        for some in rounds.drain(num_batches):
            yield from some
        if evaluates:
            yield from rounds.evaluation(count + 1)


@st.composite
def sizes(draw: st.DrawFn) -> tuple[str, int, int, int]:
    family = find_family(draw(st.sampled_from(SCHEDULE_NAMES)))
    assert isinstance(family, ScheduleFamily)
    num_ranks = draw(st.integers(2, 6))
    per_rank = draw(st.integers(family.fewest_stages, family.most_stages or 4))
    rule = family.update_rule
    fitting = [m for m in range(1, 13) if family.microbatch_rule.fits(num_ranks, m)]
    return (
        family.name,
        num_ranks,
        per_rank,
        draw(st.sampled_from(fitting)) if rule.splits_batches else 1,
    )


@given(sizes(), st.lists(st.integers(1, 7), min_size=1, max_size=3), st.booleans())
@settings(max_examples=60)
def test_one_communicator_for_two_stages_and_a_direction_never_stands_still(
    drawn: tuple[str, int, int, int], batches: list[int], evaluates: bool
) -> None:
    programs, homes = programs_of(*drawn, batches, evaluates=evaluates)
    assert find_stuck(programs, homes, by_stages) == []


@given(random_schedules(), st.integers(1, 3))
@settings(max_examples=60)
def test_a_random_order_never_stands_still(schedule: Schedule, num_batches: int) -> None:
    programs = [actions * num_batches for actions in lower(schedule.validate()).ranks]
    assert find_stuck(programs, schedule.rank_of_stage, by_stages) == []


def test_an_order_that_neighbours_do_not_share_stands_still_without_receives_in_it() -> None:
    forwards = [[f"0{kind}{index}" for index in (0, 1) for kind in ("F", "SEND_F")]]
    forwards.append([f"1{kind}{index}" for index in (1, 0) for kind in ("RECV_F", "F")])
    programs = [[Action.parse(text) for text in rank] for rank in forwards]
    assert find_stuck(programs, (0, 1), by_stages) == ["1RECV_F1"]


def test_one_communicator_for_both_directions_stands_still() -> None:
    programs, homes = programs_of("1f1b", 2, 1, 4, [1], evaluates=False)
    assert find_stuck(programs, homes, by_ranks) != []


def test_one_communicator_for_two_ranks_and_a_direction_stands_still() -> None:
    """The sender's stages send in another order than the receiver's stages receive."""
    programs, homes = programs_of("zbv", 2, 2, 4, [1], evaluates=False)
    assert find_stuck(programs, homes, by_ranks_and_direction) != []
