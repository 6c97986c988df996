"""What steps return and log, and hooks, is what it is on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from lightning_dist import PipelineStrategy
from tests.helpers.models import Classifier, make_loader, make_module, make_trainer
from tests.helpers.workers import WorkerPool


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


class LogsByPosition(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.log("shown", loss, True, False, False, True)
        return loss


def log_by_position(devices: int) -> tuple[dict[str, float], list[str]]:
    trainer = make_trainer(devices=devices, strategy=PipelineStrategy() if devices > 1 else "auto")
    trainer.fit(make_module(LogsByPosition), make_loader(), make_loader(8))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return metrics, list(trainer.progress_bar_metrics)


def test_arguments_of_log_may_come_by_position(workers: WorkerPool) -> None:
    expected, shown = log_by_position(1)
    assert shown == ["shown"]
    for metrics, found in workers.run(2, log_by_position, 2):
        assert metrics == pytest.approx(expected, abs=1e-12)
        assert found == shown
