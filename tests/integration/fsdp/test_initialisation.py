"""The weights a sharded model begins with are those of a single device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_dist import FSDPStrategy
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
