"""What one rank does for a batch, by who waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.csv_file import ScheduleFile
from lightning_dist.engine.schedules.family import RankStages, ScheduleFamily
from lightning_dist.engine.schedules.orders import forward_only
from lightning_dist.engine.schedules.registry import (
    SCHEDULE_NAMES,
    PipelineShape,
    build_forward_schedule,
    find_family,
)
from lightning_dist.engine.schedules.rounds import Rounds, Stream
from lightning_dist.engine.schedules.schedule import Schedule, lower
from tests.helpers.processes.threads import run_ranks, shapes_of
from tests.helpers.random_schedules import random_schedules

WEIGHT, SEND = ActionKind.BACKWARD_WEIGHT, ActionKind.SEND_B
LAYERS = {"1f1b": (1, 1), "zb_h1": (1, 1), "zbv": (1, 1, 1, 1), "pipedream_2bw": (1, 1)}


@pytest.mark.parametrize("schedule", LAYERS)
def test_parts_of_a_round_are_the_round(schedule: str) -> None:
    for shape in shapes_of(schedule, 4, LAYERS[schedule]):
        rounds = Rounds(shape)
        actions = rounds.training(0, 4)
        until_last_send, local_tail, of_optimizer = rounds.split(actions)
        assert (*until_last_send, *local_tail, *of_optimizer) == tuple(actions)
        assert not any(action.kind.is_send for action in local_tail)


def test_the_last_rank_of_a_zero_bubble_ends_with_what_nobody_waits_for() -> None:
    rounds = Rounds(PipelineShape("zb_h1", 4, (1, 1), 1))
    until_last_send, local_tail, _ = rounds.split(rounds.training(0, 4))
    assert until_last_send[-1].kind is SEND
    assert {action.kind for action in local_tail} == {WEIGHT}


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def note_gradient(model: nn.Sequential, pipeline: Pipeline) -> list[list[bool]]:
    """Gives, for each call of what takes results, of which micro-batches the weights still wait."""
    waiting: list[list[bool]] = []

    def take(results: list[object]) -> None:
        (stage,) = pipeline.stages.values()
        waiting.append([index in stage.in_flight for index in range(4)])
        assert len(results) == (4 if stage.is_last else 0)

    pipeline.train_batch(
        torch.ones(4, 4), lambda m: model(m.content).square().mean(), on_results=take
    )
    return waiting


def test_results_are_told_before_the_weights_of_the_last_microbatches() -> None:
    first, last = run_ranks(make, shapes_of("zb_h1", 4, (1, 1)), note_gradient)
    assert len(first) == 1
    assert last == [[False, False, True, True]]
    assert run_ranks(make, shapes_of("1f1b", 4, (1, 1)), note_gradient)[1] == [[False] * 4]


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_rank_builds_its_own_actions_and_those_of_no_other(name: str) -> None:
    """Else each rank's start would grow with the number of ranks, for the same work."""
    family = find_family(name)
    count = 4 if family.update_rule.splits_batches else 1
    homes = family.rank_of_stage(4)
    asked: set[int] = set()

    def order(place: RankStages, count: int) -> Iterator[Action]:
        asked.add(place.rank)
        return family.order(place, count)

    def stream(schedules: ScheduleFamily) -> Stream:
        return Stream(schedules, homes, num_microbatches=count, rank=2)

    watched = stream(replace(family, order=order))
    rounds = [*map(watched.round, range(4)), *watched.drain(4)]
    assert asked == {2}
    whole = lower(family.build(homes, count, 4)).ranks[2]
    if watched.asynchronous:
        assert tuple(action for actions in rounds for action in actions) == whole
    else:
        assert rounds == 4 * [lower(family.build(homes, count)).ranks[2]]


def test_an_evaluation_has_the_rounds_of_the_whole_schedule() -> None:
    homes = (0, 1, 2, 0, 1, 2)
    shape = PipelineShape("interleaved_1f1b", 3, (1,) * 6, 1, stages_per_rank=2)
    expected = lower(build_forward_schedule(homes, 5)).ranks[1]
    assert Rounds(shape).evaluation(5) == expected
    alone = build_forward_schedule(homes, 5, only_rank=1)
    assert [bool(actions) for actions in alone.ranks] == [False, True, False]


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "batch_size", "expected"),
    [
        ("1f1b", 2, 64, 8),
        ("1f1b", 2, 8, 4),
        ("1f1b", 2, 9, 4),
        ("1f1b", 2, 3, 1),
        ("1f1b", 2, 1, 1),
        ("interleaved_1f1b", 2, 8, 4),
        ("interleaved_1f1b", 2, 3, 1),
    ],
)
def test_micro_batches_have_two_samples_where_the_schedule_can(
    schedule: str, num_ranks: int, batch_size: int, expected: int
) -> None:
    assert find_family(schedule).microbatches_of(num_ranks, batch_size, 8) == expected


@pytest.mark.parametrize(
    ("schedule", "batch_size", "expected"),
    [("1f1b", 8, 8), ("1f1b", 7, 3), ("1f1b", None, 8), ("pipedream_2bw", 7, 8)],
)
def test_a_batch_of_fewer_samples_is_cut_into_fewer_micro_batches(
    schedule: str, batch_size: int | None, expected: int
) -> None:
    assert Rounds(PipelineShape(schedule, 8, (1, 1), 0)).num_pieces(batch_size) == expected


@given(random_schedules(), st.integers(1, 9))
@settings(max_examples=60)
def test_a_file_without_its_last_micro_batches_is_valid(schedule: Schedule, size: int) -> None:
    """What is left of it is in the order of the file."""
    family = ScheduleFile("file:mine.csv", forward_only, schedule=schedule)
    most, num_ranks = schedule.num_microbatches, len(schedule.ranks)
    count = family.microbatches_of(num_ranks, size, most)
    assert count == (most if size >= most else max(1, size // 2))
    cut = family.build(schedule.rank_of_stage, count)
    assert lower(cut.validate()).validate().rank_of_stage == schedule.rank_of_stage
    for rank, actions in enumerate(schedule.ranks):
        assert list(cut.ranks[rank]) == [a for a in actions if a.microbatch_index < count]


def test_a_file_cuts_a_smaller_batch_into_fewer_micro_batches(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F2,0F3,0F1,0B0,0B1,0B2,0B3\n1F3,1F2,1F1,1F0,1B3,1B2,1B1,1B0\n")
    for keeps_pairs in (False, True):
        shape = PipelineShape(f"file:{path}", 4, (1, 1), 1, keeps_pairs=keeps_pairs)
        rounds = Rounds(shape)
        assert [rounds.num_pieces(size) for size in (9, 4, 3, 2, 1)] == [4, 4, 1, 1, 1]
        for count, expected in ((1, "1F0 1B0"), (2, "1F1 1F0 1B1 1B0")):
            actions = [a for a in rounds.training(0, count) if a.kind.is_compute]
            assert " ".join(map(str, actions)) == expected
    with pytest.raises(ValueError, match="num_microbatches=2 .* which has 4"):
        Rounds(replace(shape, num_microbatches=2))
