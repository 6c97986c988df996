"""Parameters that a step uses itself, and hooks on parameters, are what they are on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from lightning_dist import PipelineStrategy
from lightning_dist.callbacks import MixedPrecision
from lightning_dist.engine.planning.partition import uniform_partition
from tests.differential.oracle_strategy import CatchUp, OracleStrategy
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool
from tests.integration.pipeline.common import EPOCHS, SIZES, Fitted, largest_difference, trainer_of

NUM_BATCHES = EPOCHS * len(SIZES)


class Scaled(Classifier):
    """Scales logits as CLIP does, and penalizes its head."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.model[-1].logit_scale = nn.Parameter(torch.tensor(0.5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        head = self.model[-1]
        logits = self.model(x.to(self.dtype)) * head.logit_scale.exp()
        penalty = 0.1 * head.weight.square().sum() + 0.3 * head.logit_scale.square()
        return F.cross_entropy(logits, y) + penalty


class Hooked(Scaled):
    """Changes gradients in ways that parts of a batch cannot be changed one by one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.num_calls = 0
        for parameter in self.model[1].parameters():
            parameter.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        self.model[-1].weight.register_hook(lambda g: g / g.norm())
        self.model[-1].logit_scale.register_hook(torch.sign)
        self.model[-1].bias.register_hook(self.count)
        for parameter in self.model[-2:].parameters():
            parameter.register_post_accumulate_grad_hook(self.shrink)

    def count(self, gradient: Tensor) -> None:
        self.num_calls += 1

    def shrink(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        parameter.grad.mul_(parameter.grad.abs().max().clamp(max=0.5))


def run(class_: type[Scaled], trainer: Any) -> Fitted:
    """Gives the count of a hook's calls in the loss's place."""
    module = make_module(class_)
    trainer.fit(module, make_loader(), make_loader())
    return state_of(module), float(getattr(module, "num_calls", 0))


def fit(num_stages: int, class_: type[Scaled], strategy: dict[str, Any], accumulate: int) -> Fitted:
    cut = PipelineStrategy(partition="uniform", **strategy)
    return run(class_, trainer_of(num_stages, cut, {"accumulate_grad_batches": accumulate}))


def fit_sequentially(class_: type[Scaled], strategy: Any, accumulate: int = 1) -> Fitted:
    drains = [CatchUp(strategy)] if isinstance(strategy, OracleStrategy) else []
    options = {"accumulate_grad_batches": accumulate, "callbacks": drains}
    return run(class_, trainer_of(1, strategy, options))


def staleness(num_stages: int, versions: str) -> Any:
    counts = uniform_partition(8, num_stages)
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    last = num_stages - 1
    by_name = {
        "stash": lambda name: last - stages[int(name.split(".")[1])],
        "vertical_sync": lambda name: last,
        "2bw": lambda name: 1,
    }
    return by_name[versions]


@pytest.mark.some("2bw-Scaled")
@pytest.mark.parametrize("class_", [Scaled, Hooked])
@pytest.mark.parametrize(
    ("strategy", "versions"),
    [
        ({"schedule": "pipedream"}, "stash"),
        ({"schedule": "pipedream", "weight_versions": "vertical_sync"}, "vertical_sync"),
        ({"schedule": "pipedream_2bw", "num_microbatches": 2}, "2bw"),
    ],
    ids=["stash", "vertical_sync", "2bw"],
)
def test_equals_the_oracle(
    workers: WorkerPool, class_: type[Scaled], strategy: dict[str, Any], versions: str
) -> None:
    actual = workers.run(3, fit, 3, class_, strategy, 1)
    lag = 1 if versions == "2bw" else 2
    oracle = OracleStrategy(staleness(3, versions), lag, torch.device("cpu"))
    expected, calls = fit_sequentially(class_, oracle)
    assert largest_difference(actual, expected) < 1e-12
    assert actual[-1][1] == calls == (NUM_BATCHES if class_ is Hooked else 0)


@pytest.mark.some("zb_h1-Hooked")
@pytest.mark.parametrize("class_", [Scaled, Hooked])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_equals_one_device(workers: WorkerPool, class_: type[Scaled], schedule: str) -> None:
    actual = workers.run(2, fit, 2, class_, {"schedule": schedule, "num_microbatches": 3}, 2)
    expected, calls = fit_sequentially(class_, SingleDeviceStrategy("cpu"), 2)
    assert largest_difference(actual, expected) < 1e-12
    assert actual[-1][1] == calls == (NUM_BATCHES if class_ is Hooked else 0)


def test_backwards_with_other_weights_run_hooks_once(workers: WorkerPool) -> None:
    strategy = {"schedule": "pipedream", "weight_versions": "none"}
    assert workers.run(2, fit, 2, Hooked, strategy, 1)[-1][1] == NUM_BATCHES


def fit_half(devices: int, class_: type[Scaled], strategy: Any) -> Fitted:
    torch.manual_seed(7)
    module = class_()
    half = MixedPrecision(compute="bf16")
    made = strategy if devices == 1 else PipelineStrategy(partition="uniform", **strategy)
    options = {"callbacks": [half], "max_epochs": EPOCHS, "limit_val_batches": 0}
    trainer = make_trainer(devices=devices, strategy=made, **options)
    trainer.fit(module, make_loader(), make_loader())
    return state_of(module), float(getattr(module, "num_calls", 0))


@pytest.mark.some("Hooked")
@pytest.mark.parametrize("class_", [Scaled, Hooked])
def test_equals_one_device_in_half_precision(workers: WorkerPool, class_: type[Scaled]) -> None:
    strategy = {"schedule": "gpipe", "num_microbatches": 1}
    actual = workers.run(2, fit_half, 2, class_, strategy)
    ((expected, calls),) = workers.run(1, fit_half, 1, class_, "auto")
    assert largest_difference(actual, expected) == 0.0
    assert actual[-1][1] == calls
