"""A pipeline of one stage runs any step: also one that no other pipeline could cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import PipelineStrategy
from lightning_dist.callbacks import MixedPrecision
from tests.helpers.networks.models import (
    Classifier,
    make_data,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool

RUNS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "micro-batches": {"schedule": "gpipe", "num_microbatches": 2},
    "pipedream": {"schedule": "pipedream"},
}


class Odd(Classifier):
    """Calls a module twice and another one at times, and uses parameters itself."""

    def __init__(self) -> None:
        super().__init__("adamw", depth=2)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(3, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        scores = self.model(x) * self.scale.exp() + self.model(-x)
        if batch_idx % 2:
            scores = self.head(scores)
        loss = F.cross_entropy(scores, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


def fit(strategy: dict[str, Any] | None, half: bool = False) -> tuple[dict[str, Tensor], Any]:
    module = make_module(Odd)
    callbacks = [MixedPrecision("bf16")] if half else []
    if half:
        module = module.float()
    asked = "auto" if strategy is None else PipelineStrategy(layers="trace", **strategy)
    trainer = make_trainer(devices=1, strategy=asked, max_epochs=2, callbacks=callbacks)
    loader = make_loader(24)
    if half:
        x, y = make_data(24).tensors
        loader = DataLoader(TensorDataset(x.float(), y), batch_size=8)
    trainer.fit(module, loader, loader)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return state_of(module), metrics


def fit_all() -> dict[str, Any]:
    runs = {name: fit(strategy) for name, strategy in RUNS.items()}
    return {**runs, "half": fit({"schedule": "1f1b"}, half=True)}


@pytest.fixture(scope="module")
def trained(workers: WorkerPool) -> dict[str, Any]:
    return workers.run(1, fit_all, timeout=120.0)[0]


@pytest.mark.parametrize("run", RUNS)
def test_equals_a_single_device(
    trained: dict[str, Any], run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected, metrics = fit(None)
    state, found = trained[run]
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert float((state[name] - value).abs().max()) < 1e-12, name
    assert found == pytest.approx(metrics, abs=1e-12)


def test_equals_a_single_device_in_half_precision(
    trained: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected, _ = fit(None, half=True)
    for name, value in expected.items():
        assert torch.equal(trained["half"][0][name], value), name
