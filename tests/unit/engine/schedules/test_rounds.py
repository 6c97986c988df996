"""What one rank does for a batch, by who waits for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.schedules.actions import ActionKind
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.schedules.rounds import Rounds
from tests.helpers.processes.threads import run_ranks, shapes_of

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
