"""Layers that sleep tell the balancer which cut would be faster."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dist import PipelineStrategy
from lightning_dist.callbacks import StageBalancer
from lightning_dist.pipeline.balance import Balance
from tests.helpers.models import Classifier, make_data, make_module, make_trainer
from tests.helpers.workers import WorkerPool

SLEEPS_MS = (12.0, 1.0, 1.0, 1.0)


class Sleepy(nn.Linear):
    def __init__(self, sleep_ms: float) -> None:
        super().__init__(12, 12)
        self.sleep_ms = sleep_ms

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.sleep_ms / 1e3)
        return super().forward(x)


class Lopsided(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Sleepy(sleep_ms) for sleep_ms in SLEEPS_MS))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0].flatten(1))[:, :3], batch[1])


def fit(
    schedule: str, num_microbatches: Any, cut: list[int]
) -> tuple[Balance | None, dict[str, float]]:
    balancer = StageBalancer(every_n_steps=4, warmup_steps=1, measured_steps=3)
    strategy = PipelineStrategy(schedule=schedule, num_microbatches=num_microbatches, partition=cut)
    trainer = make_trainer(devices=2, strategy=strategy, callbacks=[balancer], limit_val_batches=0)
    loader = DataLoader(make_data(48), batch_size=8)
    trainer.fit(make_module(Lopsided), loader, loader)
    return balancer.balance, {n: float(v) for n, v in trainer.logged_metrics.items()}


@pytest.mark.parametrize(("schedule", "num_microbatches"), [("1f1b", 4), ("pipedream", "auto")])
def test_the_better_cut_is_found_and_known_everywhere(
    workers: WorkerPool, schedule: str, num_microbatches: Any
) -> None:
    (balance, metrics), other = workers.run(2, fit, schedule, num_microbatches, [3, 1])
    assert other == (balance, metrics)
    assert balance is not None
    assert [layer.name for layer in balance.costs.layers] == ["0", "1", "2", "3"]
    assert balance.better_cut == (1, 3)
    for layer, sleep_ms in zip(balance.costs.layers, SLEEPS_MS, strict=True):
        assert layer.forward_seconds >= sleep_ms / 1e3
        assert layer.backward_seconds > 0
        assert layer.boundary_bytes == 8 // (4 if schedule == "1f1b" else 1) * 12 * 8
    assert metrics["balance/gain"] == pytest.approx(balance.gain, rel=1e-5)
    assert metrics["balance/stage_1_seconds"] < metrics["balance/stage_0_seconds"]
    assert metrics["balance/measured_step_seconds"] > 0


def test_bad_arguments_and_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="measured_steps=9 must be between 1 and every_n_steps=4"):
        StageBalancer(every_n_steps=4, measured_steps=9)
    trainer = make_trainer(devices=1, callbacks=[StageBalancer()])
    loader = DataLoader(make_data(8), batch_size=8)
    with pytest.raises(ValueError, match="stages of a PipelineStrategy.*SingleDeviceStrategy"):
        trainer.fit(make_module(), loader, loader)
