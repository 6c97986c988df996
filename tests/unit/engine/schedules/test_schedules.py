"""The schedules against their closed forms, and the referee against damaged schedules."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.registry import (
    SCHEDULE_NAMES,
    ScheduleFamily,
    build_forward_schedule,
    build_schedule,
    find_family,
)
from lightning_dist.engine.schedules.rounds import Stream
from lightning_dist.engine.schedules.schedule import Schedule, ScheduleError, lower
from lightning_dist.engine.schedules.simulator import StageCosts, makespan_seconds, simulate
from tests.helpers.random_schedules import random_schedules

stages = st.integers(1, 8)
microbatches = st.integers(1, 16)
quick = settings(max_examples=60)
LOOPED = ("interleaved_1f1b", "looped_bfs")


@st.composite
def schedules(draw: st.DrawFn, *names: str) -> Schedule:
    """Draws a schedule of one of some families, in any size that it takes."""
    family = find_family(draw(st.sampled_from(names or SCHEDULE_NAMES)))
    assert isinstance(family, ScheduleFamily)
    num_ranks = draw(stages)
    per_rank = draw(st.integers(family.fewest_stages, family.most_stages or 4))
    fitting = [m for m in range(1, 17) if family.microbatch_rule.fits(num_ranks, m)]
    return build_schedule(
        family.name,
        num_stages=num_ranks * per_rank,
        num_microbatches=draw(st.sampled_from(fitting)),
        stages_per_rank=per_rank,
        num_batches=draw(st.integers(1, 3)) if family.update_rule.completes_early else 1,
    )


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


@given(st.one_of(schedules(), random_schedules()))
@quick
def test_schedules_are_valid_before_and_after_lowering(schedule: Schedule) -> None:
    schedule.validate()
    lowered = [action for rank in lower(schedule).validate().ranks for action in rank]
    handed_over = 2 * (schedule.num_stages - 1) * schedule.num_microbatches
    assert sum(a.kind.is_send for a in lowered) == handed_over
    assert sum(a.kind.is_receive for a in lowered) == handed_over
    num_updates = schedule.num_microbatches // schedule.microbatches_per_update
    for kind in (ActionKind.REDUCE_GRAD, ActionKind.STEP):
        assert sum(a.kind is kind for a in lowered) == schedule.num_stages * num_updates


def order_of(schedule: Schedule, stage: int, kind: ActionKind) -> list[int]:
    actions = (action for rank in schedule.ranks for action in rank)
    return [a.microbatch_index for a in actions if (a.stage_index, a.kind) == (stage, kind)]


@given(st.one_of(schedules(), random_schedules()))
@quick
def test_a_stage_receives_in_the_order_in_which_its_neighbour_sends(schedule: Schedule) -> None:
    lowered = lower(schedule).validate()
    for stage in range(schedule.num_stages - 1):
        sends = order_of(lowered, stage, ActionKind.SEND_F)
        assert order_of(lowered, stage + 1, ActionKind.RECV_F) == sends
        sends = order_of(lowered, stage + 1, ActionKind.SEND_B)
        assert order_of(lowered, stage, ActionKind.RECV_B) == sends


@given(schedules())
@quick
def test_a_rank_alone_receives_as_in_the_whole_schedule(schedule: Schedule) -> None:
    for rank, actions in enumerate(lower(schedule).ranks):
        alone = tuple(own if of == rank else () for of, own in enumerate(schedule.ranks))
        assert lower(replace(schedule, ranks=alone)).ranks[rank] == actions


def test_what_is_sent_earlier_than_it_is_used_is_received_earlier() -> None:
    actions = [
        [Action.parse(text) for text in row.split(",")]
        for row in ("0F0,0F1,0B0,0B1", "1F1,1B1,1F0,1B0")
    ]
    schedule = Schedule("swapped", 2, 2, tuple(map(tuple, actions))).validate()
    first, second = (
        [str(a) for a in rank if a.kind.is_receive or a.kind.is_compute]
        for rank in lower(schedule).ranks
    )
    assert first == ["0F0", "0F1", "0RECV_B1", "0RECV_B0", "0B0", "0B1"]
    assert second == ["1RECV_F0", "1RECV_F1", "1F1", "1B1", "1F0", "1B0"]


@given(schedules())
@quick
def test_evaluation_runs_on_the_placement_of_any_schedule(schedule: Schedule) -> None:
    forward = build_forward_schedule(schedule.rank_of_stage, 5)
    assert lower(forward).validate().rank_of_stage == schedule.rank_of_stage


@given(
    schedules("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"),
    st.integers(1, 5),
    st.integers(1, 5),
)
@quick
def test_synchronous_bubbles_are_the_closed_form(
    schedule: Schedule, forward: int, backward: int
) -> None:
    n, m, v = (
        len(schedule.ranks),
        schedule.num_microbatches,
        schedule.num_stages // len(schedule.ranks),
    )
    assume(schedule.name not in LOOPED or m >= n)
    costs = StageCosts.uniform(n * v, forward, backward)
    for version in (schedule, lower(schedule)):
        timeline = simulate(version, costs)
        assert timeline.bubble_fraction == pytest.approx((n - 1) / (v * m + n - 1), abs=1e-12)


@given(schedules(), st.randoms(), st.sampled_from((0.0, 0.5)))
@quick
def test_the_makespan_alone_is_the_simulations(
    schedule: Schedule, random: Random, transfer: float
) -> None:
    forward, backward = (
        tuple(random.uniform(0.5, 2.0) for _ in range(schedule.num_stages)) for _ in range(2)
    )
    costs = StageCosts(forward, backward, transfer, input_share=0.4)
    expected = simulate(schedule, costs).makespan_seconds
    assert makespan_seconds(schedule, costs) == pytest.approx(expected, rel=1e-12)


@given(schedules("looped_bfs", "interleaved_1f1b", "zb_h1", "zbv"))
@quick
def test_too_few_micro_batches_have_a_larger_bubble(schedule: Schedule) -> None:
    n, m = len(schedule.ranks), schedule.num_microbatches
    v = schedule.num_stages // n
    assume(n > 1 and m < n)
    closed = (n - 1) / ((3 * v if schedule.name.startswith("zb") else v) * m + n - 1)
    assert simulate(schedule, StageCosts.uniform(n * v, 1, 2)).bubble_fraction > closed + 1e-9


@given(schedules("zb_h1"))
@quick
def test_zero_bubbles_of_h1_are_the_closed_form(schedule: Schedule) -> None:
    n, m = len(schedule.ranks), schedule.num_microbatches
    assume(m >= n)
    timeline = simulate(lower(schedule), StageCosts.uniform(n, 1, 2))
    assert timeline.bubble_fraction == pytest.approx((n - 1) / (3 * m + n - 1), abs=1e-12)


@given(schedules("zbv"))
@quick
def test_zero_bubbles_of_v_are_the_closed_form(schedule: Schedule) -> None:
    n, m = len(schedule.ranks), schedule.num_microbatches
    assume(m >= 2 * n - 1)
    timeline = simulate(schedule, StageCosts.uniform(2 * n, 0.5, 1))
    assert timeline.makespan_seconds == 3 * m + (n - 1) / 2
    for rank in range(n):
        own = [span for span in timeline.spans if span.rank == rank]
        first = min(span.start_seconds for span in own)
        assert max(span.end_seconds for span in own) - first == timeline.busy_seconds(rank)


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
    assert peaks("zb_h1") == [min(m, n)] * n


@given(stages, st.integers(2, 4), microbatches, st.integers(0, 7))
@quick
def test_activations_in_flight_on_several_stages(n: int, v: int, rounds: int, more: int) -> None:
    size = n + more % n // rounds  # of a round, of which there are as many as whole ones of n

    def peaks(name: str, m: int, v: int) -> list[int]:
        schedule = build_schedule(name, num_stages=n * v, num_microbatches=m, stages_per_rank=v)
        return [schedule.in_flight(rank) for rank in range(n)]

    m = size * rounds
    assert peaks("looped_bfs", m, v) == [v * m] * n
    # Its laps but the last, there and back its hops, and the one at hand.
    warmups = [(v - 1) * size + 2 * (n - 1 - rank) + 1 for rank in range(n)]
    assert peaks("interleaved_1f1b", m, v) == [min(v * m, warmup) for warmup in warmups]
    assert peaks("zbv", 2 * n - 1 + rounds, 2) == [2 * n] * n  # of half the size


@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 6))
@quick
def test_2bw_holds_a_stage_per_rank_behind_and_has_no_bubble(n: int, extra: int, k: int) -> None:
    m = n - 2 + extra
    schedule = build_schedule("pipedream_2bw", num_stages=n, num_microbatches=m, num_batches=k)
    timeline = simulate(lower(schedule), StageCosts.uniform(n, 1, 2))
    assert timeline.makespan_seconds == (m * k + n - 1) * 3
    assert [schedule.in_flight(rank) for rank in range(n)] == [min(m * k, n - r) for r in range(n)]


@given(n=st.integers(2, 8), extra=st.integers(0, 3), k=st.integers(2, 4))
@quick
def test_2bw_gives_sums_over_stages_the_time_to_come_back(n: int, extra: int, k: int) -> None:
    m, forward = n - 1 + extra, 1.0
    schedule = build_schedule("pipedream_2bw", num_stages=n, num_microbatches=m, num_batches=k)
    ends = {
        span.action: span.end_seconds for span in simulate(schedule, StageCosts.uniform(n)).spans
    }

    def reached(stage: int, mark: Action) -> float:
        """When a rank is done with all that it computes before an action."""
        actions = lower(schedule).ranks[stage]
        return max(ends.get(action, 0.0) for action in actions[: actions.index(mark)])

    for update in range(k - 1):  # the last one is a drain's
        complete = [reached(s, Action(s, ActionKind.REDUCE_GRAD, update)) for s in range(n)]
        assert complete == sorted(complete, reverse=True), "later stages have theirs earlier"
        for stage in range(n):
            due = reached(stage, Action(stage, ActionKind.STEP, update))
            assert due - complete[0] >= stage * forward


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
    with pytest.raises(ValueError, match="1 forwards.*the schedule has 2 stages"):
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
    with pytest.raises(ValueError, match="stages_per_rank=0.*at least 1"):
        build_schedule("looped_bfs", num_stages=2, num_microbatches=2, stages_per_rank=0)
    with pytest.raises(ValueError, match="zigzag.*1f1b"):
        build_schedule("zigzag", num_stages=2, num_microbatches=2)


def test_a_synchronous_round_is_the_whole_schedule() -> None:
    family = find_family("gpipe")
    stream = Stream(family, family.rank_of_stage(3), num_microbatches=4, rank=1)
    whole = lower(build_schedule("gpipe", num_stages=3, num_microbatches=4))
    assert stream.round(0) == stream.round(7) == whole.ranks[1]
    assert stream.drain(3) == ()
    with pytest.raises(ValueError, match="one micro-batch"):
        Stream(find_family("pipedream"), (0, 1), num_microbatches=2, rank=0)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("interleaved_1f1b", (8, 9, 2), "num_microbatches=9 .* 4 ranks.* Use 8 or 10"),
        ("interleaved_1f1b", (9, 8, 2), "num_stages=9 must be a multiple .*2"),
        ("interleaved_1f1b", (4, 8, 1), "stages_per_rank=1 .* takes 2 or more"),
        ("1f1b", (4, 8, 2), "stages_per_rank=2 .* takes 1"),
        ("zbv", (6, 8, 3), "stages_per_rank=3 .* takes 2"),
        ("pipedream_2bw", (4, 2, 1), "num_microbatches=2 .* 4 ranks.* Use 3"),
    ],
)
def test_sizes_that_do_not_fit_are_named(
    name: str, sizes: tuple[int, int, int], message: str
) -> None:
    num_stages, num_microbatches, stages_per_rank = sizes
    with pytest.raises(ValueError, match=message):
        build_schedule(
            name,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            stages_per_rank=stages_per_rank,
        )
