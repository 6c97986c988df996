"""The weights a sharded model begins with are those of a single device."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_dist import DDPStrategy, FSDPStrategy, MeshStrategy
from lightning_dist.checkpoint import load_full
from tests.helpers.networks.models import (
    Classifier,
    ConvLayer,
    make_layers,
    make_loader,
    make_trainer,
)
from tests.helpers.networks.models import state_of as parameters_of
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import assert_close


class BuiltLate(Classifier):
    """Builds its layers in ``configure_model``, and remembers what they were built as."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Identity()
        self.first: Callable[[], Tensor] | None = None  # what a list has would be replaced
        self.initial: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if self.first is not None:
            return
        self.model = make_layers(4)
        self.model[3].linear = self.model[2].linear  # tied
        self.model.register_buffer("steps", torch.arange(3.0), persistent=False)
        for layer in self.model:
            if isinstance(layer, ConvLayer):
                nn.init.trunc_normal_(layer.conv.weight, std=0.5)
        weight = self.model[0].conv.weight
        self.first = lambda: weight
        self.scales = {"drawn": [torch.rand(3)]}  # neither a parameter nor a buffer
        self.mean = MeanMetric()

    def on_fit_start(self) -> None:
        self.initial = parameters_of(self)
        self.initial["steps"] = self.model.steps.clone()
        self.initial["scale"] = self.scales["drawn"][0].clone()
        self.initial["mean"] = self.mean.mean_value.clone()


def fit(options: dict[str, Any] | None, devices: int, seeds_differ: bool = False) -> Any:
    torch.manual_seed(7 + int(os.environ["RANK"]) if seeds_differ else 7)
    module = BuiltLate()
    strategy = "auto" if options is None else FSDPStrategy(**options)
    trainer = make_trainer(devices=devices, strategy=strategy, precision="64-true", max_steps=2)
    trainer.fit(module, make_loader(16), make_loader(8))
    trainer.validate(module, make_loader(8), verbose=False)
    assert module.first is not None
    return module.initial, parameters_of(module), module.first().is_meta


@pytest.mark.some("4-options2", "2-options3")
@pytest.mark.parametrize(
    ("devices", "options"), [(2, {}), (4, {}), (4, {"shard_size": 2}), (2, {"meta_init": False})]
)
def test_the_same_seed_gives_the_same_weights_on_any_number_of_shards(
    workers: WorkerPool, devices: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    initial, final, was_meta = fit(None, 1)
    assert not was_meta
    for initial_here, final_here, was_meta in workers.run(devices, fit, options, devices):
        assert was_meta == options.get("meta_init", True)
        assert initial_here.keys() == initial.keys()
        for name, value in initial.items():
            assert torch.equal(initial_here[name], value), name
        assert_close(final_here, final)


@pytest.mark.some("True")
@pytest.mark.parametrize("meta_init", [True, False])
def test_ranks_that_nobody_seeded_begin_with_the_first_ones_weights(
    workers: WorkerPool, meta_init: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected, _, _ = fit(None, 1)
    for initial, _, _ in workers.run(2, fit, {"meta_init": meta_init}, 2, True):
        for name, value in expected.items():
            assert torch.equal(initial[name], value), name


def fit_built_early() -> dict[str, Tensor]:
    torch.manual_seed(7 + int(os.environ["RANK"]))
    module = Classifier()
    trainer = make_trainer(devices=2, strategy=FSDPStrategy(), precision="64-true", max_steps=0)
    trainer.fit(module, make_loader(16), make_loader(8))
    return parameters_of(module)


def test_a_model_that_each_rank_has_built_begins_with_the_first_ones_weights(
    workers: WorkerPool,
) -> None:
    torch.manual_seed(7)
    expected = dict(Classifier().double().named_parameters())
    for initial in workers.run(2, fit_built_early):
        for name, value in expected.items():
            assert torch.equal(initial[name], value), name


class Communicates(BuiltLate):
    """Asks other ranks while it builds its layers, and loads weights."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.answers: list[Any] = []

    def configure_model(self) -> None:
        super().configure_model()
        if self.answers:
            return
        strategy, rank = self.trainer.strategy, self.global_rank
        numbers = torch.arange(3.0) + rank
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, {"rank": rank})
        self.answers = [
            objects,
            strategy.broadcast({"from": rank}),
            strategy.reduce(numbers.clone(), reduce_op="sum").tolist(),
            (2 * self.all_gather(numbers)).flatten().tolist(),
            numbers.tolist(),
            strategy.reduce_boolean_decision(rank == 0),
        ]
        saved = strategy.load_checkpoint(self.path)["state_dict"]
        self.load_state_dict({name: value + 1 for name, value in saved.items()})


def communicate(strategy: Any, path: str) -> tuple[list[Any], dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(7)
    options: dict[str, Any] = {"precision": "64-true", "max_steps": 1}
    earlier = make_trainer(devices=2, strategy=DDPStrategy(), **options)
    earlier.fit(BuiltLate(), make_loader(8), make_loader(8))
    earlier.save_checkpoint(path)
    module = Communicates(path)
    trainer = make_trainer(devices=2, strategy=strategy, **options)
    trainer.fit(module, make_loader(8), make_loader(8))
    return module.answers, module.initial, load_full(path)["state_dict"]


@pytest.mark.some("fsdp")
@pytest.mark.parametrize(
    "strategy",
    [DDPStrategy(), FSDPStrategy(), MeshStrategy(dp_shard=2)],
    ids=["ddp", "fsdp", "mesh"],
)
def test_ranks_may_communicate_while_a_model_is_built(
    workers: WorkerPool, strategy: Any, tmp_path: Path
) -> None:
    for rank, found in enumerate(workers.run(2, communicate, strategy, str(tmp_path / "a.ckpt"))):
        answers, initial, saved = found
        own, other = torch.arange(3.0) + rank, torch.arange(3.0) + 1 - rank
        both = [own, other] if rank == 0 else [other, own]
        assert answers == [
            [{"rank": 0}, {"rank": 1}],
            {"from": 0},
            (own + other).tolist(),
            (2 * torch.cat(both)).tolist(),
            own.tolist(),
            False,
        ]
        assert_close(
            {name: initial[name] for name in saved if name in initial},
            {name: value + 1 for name, value in saved.items() if name in initial},
        )
        assert "model.0.conv.weight" in initial
