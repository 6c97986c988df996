"""A rank alone waits for no gradients: parameters that a step leaves out are left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightning_dist import DDPStrategy, FSDPStrategy, MeshStrategy, TensorParallelStrategy
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool

STRATEGIES: list[type[Strategy]] = [
    DDPStrategy,
    FSDPStrategy,
    MeshStrategy,
    TensorParallelStrategy,
]


class Idle(Classifier):
    """Uses a layer in each second step, and another in none; weight decay would move both."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.at_times = nn.Linear(3, 3)
        self.spare = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.model(batch[0])
        if batch_idx % 2:
            scores = self.at_times(scores)
        return F.cross_entropy(scores, batch[1])


def fit(strategy: Any) -> dict[str, Tensor]:
    module = make_module(Idle)
    trainer = make_trainer(devices=1, strategy=strategy, accumulate_grad_batches=2, max_epochs=2)
    trainer.fit(module, make_loader(40), make_loader(8))
    return state_of(module)


def fit_each() -> list[dict[str, Tensor]]:
    return [fit(strategy()) for strategy in STRATEGIES]


def test_equals_a_single_device(workers: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = workers.run(1, fit_each, timeout=120.0)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected = fit("auto")
    for strategy, state in zip(STRATEGIES, found, strict=True):
        for name, value in expected.items():
            assert float((state[name] - value).abs().max()) < 1e-12, (strategy.__name__, name)
