"""The schedules against their closed forms, and the referee against damaged schedules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dist.pipeline.actions import Action, ActionKind
from lightning_dist.pipeline.lowering import add_communication, lower
from lightning_dist.pipeline.schedule import Schedule, ScheduleError
from lightning_dist.pipeline.schedules import SCHEDULE_NAMES, build_schedule
from lightning_dist.pipeline.simulator import StageCosts, simulate
from lightning_dist.pipeline.stream import Stream

stages = st.integers(1, 8)
microbatches = st.integers(1, 16)
names = st.sampled_from(SCHEDULE_NAMES)
quick = settings(max_examples=60, deadline=None)


@given(st.sampled_from(ActionKind), st.integers(0, 99), st.integers(0, 9999))
@quick
def test_actions_are_read_as_they_are_written(kind: ActionKind, stage: int, index: int) -> None:
    action = Action(stage, kind, index)
    assert Action.parse(str(action)) == action


def test_the_short_name_of_an_action() -> None:
    assert str(Action(2, ActionKind.FORWARD, 0)) == "2F0"
    assert Action.parse("1SEND_B3") == Action(1, ActionKind.SEND_B, 3)
    with pytest.raises(ValueError, match="2X0.*2F0"):
        Action.parse("2X0")


@given(names, stages, microbatches)
@quick
def test_schedules_are_valid_before_and_after_lowering(name: str, n: int, m: int) -> None:
    schedule = build_schedule(name, num_stages=n, num_microbatches=m).validate()
    add_communication(schedule).validate()
    sends = [a for rank in lower(schedule).ranks for a in rank if a.kind.is_send]
    receives = [a for rank in lower(schedule).ranks for a in rank if a.kind.is_receive]
    assert len(sends) == len(receives) == 2 * (n - 1) * m


@given(
    st.sampled_from(["gpipe", "1f1b"]), stages, microbatches, st.integers(1, 5), st.integers(1, 5)
)
@quick
def test_synchronous_bubbles_are_the_closed_form(
    name: str, n: int, m: int, forward: int, backward: int
) -> None:
    schedule = build_schedule(name, num_stages=n, num_microbatches=m)
    costs = StageCosts.uniform(n, forward, backward)
    for version in (schedule, add_communication(schedule), lower(schedule)):
        timeline = simulate(version, costs)
        assert timeline.bubble_fraction == (n - 1) / (m + n - 1)
        assert timeline.makespan_seconds == (m + n - 1) * (forward + backward)


@given(stages, microbatches, st.integers(1, 5), st.integers(1, 5))
@quick
def test_pipedream_takes_as_long_as_its_closed_form(n: int, m: int, f: int, b: int) -> None:
    schedule = build_schedule("pipedream", num_stages=n, num_microbatches=m)
    timeline = simulate(lower(schedule), StageCosts.uniform(n, f, b))
    assert timeline.makespan_seconds == (m + n - 1) * (f + b)


@given(stages, microbatches)
@quick
def test_activations_in_flight(n: int, m: int) -> None:
    def peaks(name: str) -> list[int]:
        schedule = build_schedule(name, num_stages=n, num_microbatches=m)
        return [schedule.in_flight(rank) for rank in range(n)]

    assert peaks("gpipe") == [m] * n
    assert peaks("1f1b") == peaks("pipedream") == [min(m, n - s) for s in range(n)]


def test_sixty_four_stages_and_a_thousand_microbatches_are_quick() -> None:
    schedule = build_schedule("1f1b", num_stages=64, num_microbatches=1024)
    timeline = simulate(schedule, StageCosts.uniform(64))
    assert timeline.bubble_fraction == 63 / (1024 + 63)


def test_slow_stages_and_transfers_lengthen_the_schedule() -> None:
    schedule = lower(build_schedule("1f1b", num_stages=2, num_microbatches=2))
    even = simulate(schedule, StageCosts.uniform(2)).makespan_seconds
    slow = simulate(schedule, StageCosts((1.0, 2.0), (2.0, 4.0))).makespan_seconds
    far = simulate(schedule, StageCosts.uniform(2, transfer_seconds=0.5)).makespan_seconds
    late = simulate(schedule, StageCosts.uniform(2, update_seconds=0.25)).makespan_seconds
    assert (even, slow, far, late) == (9.0, 15.0, 10.0, 9.25)
    with pytest.raises(ValueError, match="1 forwards.*2 stages"):
        simulate(schedule, StageCosts.uniform(1))


def damaged(change: object) -> Schedule:
    schedule = build_schedule("1f1b", num_stages=2, num_microbatches=3)
    ranks = [list(rank) for rank in schedule.ranks]
    change(ranks)  # type: ignore[operator]
    return replace(schedule, ranks=tuple(tuple(rank) for rank in ranks))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r[1].pop(), "misses.*1B2"),
        (lambda r: r[0].append(r[0][0]), "doubled.*0F0"),
        (lambda r: r[0].append(Action.parse("2F0")), "2F0.*impossible"),
        (lambda r: r[0].append(Action.parse("0F7")), "0F7.*impossible"),
        (lambda r: r[0].append(r[1].pop()), "1B2 is on rank|1F0 is on rank|lives on one rank"),
        (lambda r: r[1].reverse(), "deadlocks.*rank 1 waits with 1B2 for 1F2"),
        (lambda r: r[0].insert(0, r[0].pop()), "deadlocks: rank 0 waits with 0B2 for 0F2"),
    ],
)
def test_the_referee_finds_each_damage(change: object, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        damaged(change).validate()


def test_the_referee_finds_a_communication_deadlock() -> None:
    schedule = lower(build_schedule("1f1b", num_stages=2, num_microbatches=2))
    ranks = [list(rank) for rank in schedule.ranks]
    receive = Action.parse("0RECV_B0")
    ranks[0].remove(receive)
    ranks[0].insert(0, receive)
    with pytest.raises(ScheduleError, match="0RECV_B0 for 1SEND_B0.*1RECV_F0 for 0SEND_F0"):
        replace(schedule, ranks=tuple(tuple(rank) for rank in ranks)).validate()


def test_the_grid_marks_an_action() -> None:
    schedule = build_schedule("1f1b", num_stages=2, num_microbatches=2)
    assert schedule.format_grid().splitlines() == [
        "rank  0  F0 F1 .  B0 .  B1",
        "rank  1  .  F0 B0 F1 B1 .",
    ]
    marked = schedule.format_grid(mark=Action.parse("1RECV_F1"))
    assert ">F1<" in marked.splitlines()[1]
    long = build_schedule("gpipe", num_stages=2, num_microbatches=100)
    assert "of 202" in long.format_grid(mark=Action.parse("0B70"))
    assert ">B70<" in long.format_grid(mark=Action.parse("0B70"))


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        build_schedule("1f1b", num_stages=sizes[0], num_microbatches=sizes[1])
    with pytest.raises(ValueError, match="zigzag.*1f1b"):
        build_schedule("zigzag", num_stages=2, num_microbatches=2)


@given(stages, st.integers(1, 20), st.data())
@quick
def test_rounds_and_drain_are_the_whole_schedule(n: int, batches: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, n - 1))
    stream = Stream("pipedream", num_stages=n, num_microbatches=1, rank=rank)
    whole = lower(build_schedule("pipedream", num_stages=n, num_microbatches=batches))
    rounds = [action for k in range(batches) for action in stream.round(k)]
    drain = [action for part in stream.drain(batches) for action in part]
    assert tuple(rounds + drain) == whole.ranks[rank]
    assert all(part[-1].kind is ActionKind.STEP for part in stream.drain(batches))
    assert len(stream.drain(batches)) == min(batches, stream.delay)


def test_a_synchronous_round_is_the_whole_schedule() -> None:
    stream = Stream("gpipe", num_stages=3, num_microbatches=4, rank=1)
    whole = lower(build_schedule("gpipe", num_stages=3, num_microbatches=4))
    assert stream.round(0) == stream.round(7) == whole.ranks[1]
    assert stream.drain(3) == ()
    with pytest.raises(ValueError, match="one micro-batch"):
        Stream("pipedream", num_stages=2, num_microbatches=2, rank=0)
