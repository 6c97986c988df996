"""``pipedream`` in half precision whose backwards see other weights, or forwards predicted ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist.engine.pipeline.gradients import HeldGradients
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.stashing.half_versions import HalfWeights
from lightning_dist.engine.stashing.prediction import extrapolated
from tests.helpers.half_reference import half_weights, one_thread
from tests.helpers.networks.models import make_optimizer
from tests.helpers.oracle import train_late, train_sequentially
from tests.helpers.processes.threads import run_ranks, shapes_of, train_with

BF16, NUM_STAGES = torch.bfloat16, 3
BATCHES = [
    (torch.randn(8, 6, generator=torch.Generator().manual_seed(i)), torch.arange(8) % 6)
    for i in range(7)
]


HALF = HalfWeights(lambda p: BF16 if p.dim() == 2 else p.dtype)
"""Linears are half, and norms are not."""


class Layer(nn.Module):
    """Computes in what it is given, but for its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, bias=False)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x).float()).to(x.dtype))


def make() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Layer() for _ in range(NUM_STAGES)))


def loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), y)


def foresee(
    stage: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[int], dict[str, Tensor]]:
    """Casts what the optimizer will make of the weights."""
    own = dict(stage.named_parameters())
    dtypes = {name: weight.dtype for name, weight in half_weights(stage, BF16).items()}
    seen = [extrapolated(optimizer, own, count) for count in range(NUM_STAGES)]

    def at(count: int) -> dict[str, Tensor]:
        found = seen[count].items()
        return {name: w.to(dtypes[name]).detach().clone().requires_grad_() for name, w in found}

    return at


def expected(optimizer: str, weight_versions: str, predicts: bool) -> dict[str, Tensor]:
    model = make()
    stages = [model[s : s + 1] for s in range(NUM_STAGES)]
    optimizers = [make_optimizer(optimizer, stage.parameters()) for stage in stages]
    batches = [(x.to(BF16), y) for x, y in BATCHES]
    with one_thread():
        train_sequentially(
            stages,
            optimizers,
            batches,
            loss,
            (),
            weight_versions,
            foresee=foresee if predicts else None,
            copy=lambda stage: half_weights(stage, BF16),
        )
    return model.state_dict()


def expected_late(optimizer: str, *, predicts: bool) -> dict[str, Tensor]:
    model = make()
    batches = [(x.to(BF16), y) for x, y in BATCHES]
    with one_thread():
        train_late(
            model,
            make_optimizer(optimizer, model.parameters()),
            batches,
            loss,
            (),
            foresee=foresee if predicts else None,
            copy=lambda whole: half_weights(whole, BF16),
        )
    return model.state_dict()


def actual(
    optimizer: str,
    schedule: str = "pipedream",
    layers_per_stage: tuple[int, ...] = (1,) * NUM_STAGES,
    **options: Any,
) -> tuple[dict[str, Tensor], list[int]]:
    optimizers: dict[nn.Parameter, torch.optim.Optimizer] = {}
    stashed: list[int] = []

    def remembered(parameters: Any) -> torch.optim.Optimizer:
        own = list(parameters)
        made = make_optimizer(optimizer, own)
        optimizers.update(dict.fromkeys(own, made))
        return made

    def predict(parameters: Mapping[str, nn.Parameter], count: int) -> Mapping[str, Tensor]:
        return extrapolated(optimizers[next(iter(parameters.values()))], parameters, count)

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss(model(batch[0].to(BF16)), batch[1])

    train = train_with(remembered, BATCHES, step)

    def trained(model: nn.Sequential, pipeline: Pipeline) -> dict[str, Tensor]:
        state = train(model, pipeline)
        stashed.append(sum(pipeline.stages.peak_stash_bytes.values()))
        return state

    if options.pop("predicts", False):
        options["predict"] = predict
    parts = run_ranks(
        make,
        shapes_of(schedule, 1, layers_per_stage, len(layers_per_stage)),
        trained,
        half=HALF,
        gradients=lambda _: HeldGradients(torch.float32),
        **options,
    )
    return {name: value for part in parts for name, value in part.items()}, stashed


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "options",
    [{"weight_versions": "stash"}, {"weight_versions": "none"}, {"predicts": True}],
    ids=["stash", "none", "predict"],
)
def test_follows_the_loop(optimizer: str, options: dict[str, Any]) -> None:
    versions = options.get("weight_versions", "stash")
    wanted = expected(optimizer, versions, "predicts" in options)
    found, stashed = actual(optimizer, **options)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    assert any(stashed) == (versions != "none")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_forecast_of_one_update_follows_the_loop(optimizer: str) -> None:
    wanted = expected_late(optimizer, predicts=True)
    found, stashed = actual(optimizer, "pipedream_2bw", (2, 1), predicts=True)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    assert all(stashed)
    plain = expected_late(optimizer, predicts=False)
    assert not torch.equal(plain["0.linear.weight"], wanted["0.linear.weight"])


def test_these_are_different_recursions() -> None:
    ways = [("stash", False), ("none", False), ("stash", True)]
    first, second, third = (expected("sgd", *way)["0.linear.weight"] for way in ways)
    assert not torch.equal(first, second)
    assert not torch.equal(first, third)
    assert not torch.equal(second, third)
