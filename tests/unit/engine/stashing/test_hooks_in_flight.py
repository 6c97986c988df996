"""Hooks freeze layers and write weights while batches are in flight, against plain loops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.stashing.half_versions import CastWeights, HalfWeights
from lightning_dist.engine.stashing.prediction import Predicted
from lightning_dist.engine.stashing.versions import ComputeWeights, Stashed, WeightPolicy
from tests.helpers.processes.threads import run_ranks

NUM_STAGES = 3
NUM_BATCHES = 6
FROZEN_FROM = 3
LIMIT = 0.3
RATE = 0.5
Hook = Callable[[nn.Sequential, int], None]


def make() -> nn.Sequential:
    torch.manual_seed(0)
    parts = (nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Tanh()) for _ in range(NUM_STAGES))
    return nn.Sequential(*parts).double()


def batches() -> list[Tensor]:
    data = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, generator=data, dtype=torch.float64) for _ in range(NUM_BATCHES)]


def loss_of(outputs: Tensor) -> Tensor:
    return (outputs - 1.0).square().mean()


@torch.no_grad()
def clamp(part: nn.Module) -> None:
    for parameter in part.parameters():
        parameter.data.clamp_(-LIMIT, LIMIT)  # torch does not count a write by `.data`


def freeze(part: nn.Module) -> None:
    part.requires_grad_(False)


def train(schedule: str, before: Hook, behind: Hook) -> list[list[Tensor]]:
    """Trains with hooks around each batch; returns each stage's weights."""

    def of_rank(net: nn.Sequential, pipeline: Pipeline) -> list[Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), lr=RATE)

        def update() -> None:
            optimizer.zero_grad()
            pipeline.install_gradients()
            with pipeline.updating():
                optimizer.step()

        for index, batch in enumerate(batches()):
            before(net, index)
            pipeline.train_batch(batch, lambda m: loss_of(net(m.content)))
            if pipeline.has_gradients:
                update()
                optimizer.zero_grad()
            behind(net, index)
        for _ in pipeline.drain():
            update()
        return [p.detach() for p in net[pipeline.shape.rank].parameters()]

    count = 1 if schedule == "pipedream" else 2
    shapes = [PipelineShape(schedule, count, (1,) * NUM_STAGES, rank) for rank in range(NUM_STAGES)]
    found: list[list[Tensor]] = run_ranks(make, shapes, of_rank)
    return found


def delay_of(schedule: str, stage: int) -> int:
    return 1 if schedule == "pipedream_2bw" else NUM_STAGES - 1 - stage


def train_sequentially(
    schedule: str, trains: Callable[[int, int], bool], behind: Callable[[nn.Module], None]
) -> list[list[Tensor]]:
    """A stage runs batch k, updates for batch k - delay, and then its hook writes."""
    parts = [make()[stage] for stage in range(NUM_STAGES)]
    delays = [delay_of(schedule, stage) for stage in range(NUM_STAGES)]
    used: list[list[nn.Module]] = []  # by stage and batch
    for part, delay in zip(parts, delays, strict=True):
        used.append([copy.deepcopy(part)])
        for _ in range(delay):
            behind(part)
            used[-1].append(copy.deepcopy(part))
    for b, batch in enumerate(batches()):
        seen = nn.Sequential(*(copy.deepcopy(versions[b]) for versions in used))
        loss_of(seen(batch)).backward()
        for stage, (part, delay) in enumerate(zip(parts, delays, strict=True)):
            for own, other in zip(part.parameters(), seen[stage].parameters(), strict=True):
                if trains(stage, b):
                    assert other.grad is not None
                    own.data -= RATE * other.grad
            if b + delay < NUM_BATCHES:
                behind(part)
            used[stage].append(copy.deepcopy(part))
    return [[p.detach() for p in part.parameters()] for part in parts]


def assert_equal(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-14)


def nothing(*_: Any) -> None:
    pass


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_gradients_in_flight_reach_layers_that_were_frozen_since(schedule: str) -> None:
    def before(net: nn.Sequential, index: int) -> None:
        if index == FROZEN_FROM:
            freeze(net[:-1])

    def trains(stage: int, batch: int) -> bool:
        return batch < FROZEN_FROM or stage == NUM_STAGES - 1

    expected = train_sequentially(schedule, trains, nothing)
    assert_equal(train(schedule, before, nothing), expected)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_hooks_may_write_while_the_pipeline_fills(schedule: str) -> None:
    expected = train_sequentially(schedule, lambda *_: True, clamp)
    found = train(schedule, nothing, lambda net, _: clamp(net))
    assert_equal(found, expected)


def stashed_of(parameters: Any) -> WeightPolicy:
    return Stashed(ComputeWeights(parameters))


def half_of(parameters: Any, max_age: int = 0) -> WeightPolicy:
    return Stashed(CastWeights(parameters, HalfWeights(lambda _: torch.bfloat16)), max_age)


def predicted_of(parameters: Any) -> WeightPolicy:
    return Predicted(ComputeWeights(parameters), lambda _: {})


@pytest.mark.parametrize("policy_of", [stashed_of, half_of, predicted_of])
def test_a_version_in_flight_stays_and_the_next_sees_the_write(
    policy_of: Callable[[Any], WeightPolicy],
) -> None:
    weight = nn.Parameter(torch.ones(3))
    policy = policy_of([("weight", weight)])
    first = policy.acquire()
    policy.protect_versions()
    weight.data.mul_(2.0)
    assert first.aliases["weight"].tolist() == [1.0] * 3
    second = policy.acquire()
    assert second.aliases["weight"].tolist() == [2.0] * 3
    assert policy.stash_bytes > 0
    policy.release(first)
    policy.release(second)
    policy.before_step()
    assert policy.stash_bytes == 0


def test_casts_follow_a_frozen_weight_that_an_update_still_reaches() -> None:
    weight = nn.Parameter(torch.ones(3))
    policy = half_of([("weight", weight)])
    policy.acquire()
    weight.requires_grad_(False)
    policy.before_step()
    policy.acquire()  # of the frozen one
    weight.grad = torch.ones(3)
    policy.before_step()
    weight.data.mul_(2.0)  # as the optimizer does
    assert policy.acquire().aliases["weight"].tolist() == [2.0] * 3


def test_casts_of_a_drain_under_vertical_sync_follow_it_too() -> None:
    weight = nn.Parameter(torch.ones(3), requires_grad=False)
    policy = half_of([("weight", weight)], max_age=1)
    weight.grad = torch.ones(3)
    policy.before_step()  # no forward since the last update, so the version is cast here
    weight.data.mul_(2.0)  # as the optimizer does
    weight.grad = None
    policy.before_step()
    assert policy.acquire().aliases["weight"].tolist() == [2.0] * 3
