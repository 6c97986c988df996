"""The module that runs a stage's layers, where the caller gives another one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.pipeline.pipeline import Pipeline
from tests.helpers.processes.threads import run_ranks, shapes_of, train_with

LAYERS = (2, 2)
BATCHES = [torch.linspace(-1, 1, 24).reshape(6, 4).double() + number for number in range(5)]


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(4)))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = (model(batch) - 1).square().mean()
    return loss


def part_of(models: list[nn.Sequential], stage: int, *, wraps: bool) -> nn.Module:
    part = nn.Sequential()
    for index in range(2 * stage, 2 * stage + 2):
        part.add_module(str(index), models[stage][index])
    if wraps:
        return nn.ModuleDict({"wrapped": part})  # names parameters as `torch.compile(part)` does
    part.compile(backend="eager")
    return part


def train(schedule: str, *, wraps: bool | None) -> dict[str, Tensor]:
    models: list[nn.Sequential] = []

    def make_one() -> nn.Sequential:
        models.append(make().double())
        return models[-1]

    options = {} if wraps is None else {"layers": partial(part_of, models, wraps=wraps)}
    count = 1 if schedule == "pipedream" else 2
    loop = train_with(partial(torch.optim.SGD, lr=0.1, momentum=0.9), BATCHES, loss_of)
    states = run_ranks(make_one, shapes_of(schedule, count, LAYERS), loop, **options)
    return {name: value for state in states for name, value in state.items()}


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "pipedream", "pipedream_2bw"])
def test_a_module_that_torch_compiles_in_place_trains_the_same(schedule: str) -> None:
    expected, found = train(schedule, wraps=None), train(schedule, wraps=False)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_module_with_other_names_is_refused(schedule: str) -> None:
    with pytest.raises(ValueError, match=r"stage 0 .*'wrapped\.0\.0\.bias'.*module\.compile\(\)"):
        train(schedule, wraps=True)


def call_outside(model: nn.Sequential, pipeline: Pipeline) -> str:
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match="outside of a step") as caught:
        model(x)
    pipeline.stages.on_call = lambda found: found + 1
    assert torch.equal(model(x), x + 1)
    return str(caught.value)


def test_a_call_outside_of_a_step_is_refused_without_an_answer() -> None:
    answers = run_ranks(make, shapes_of("1f1b", 2, LAYERS), call_outside)
    assert all("training_step" in answer for answer in answers)
