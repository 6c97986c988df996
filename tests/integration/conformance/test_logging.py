"""What is logged over all ranks is the same on each, and what a single device logs."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from tests.helpers.networks.models import Classifier, make_module
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import DEPTH, TOLERANCE, loaders_of, trainer_of
from tests.integration.conformance.strategies import ENTRIES, TYPICAL


class Logging(Classifier):
    """Logs each reduction, per step and per epoch, and metrics that sum up over the epoch.

    Whole numbers are those that are reduced within a batch too, over micro-batches and replicas.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(depth=DEPTH, **kwargs)
        self.train_accuracy = MulticlassAccuracy(3, average="micro")
        self.val_accuracy = MulticlassAccuracy(3, average="macro")

    def _log_all(self, prefix: str, logits: Tensor, **when: bool) -> None:
        tenths = (10 * logits).long()
        numbers: dict[str, Any] = {"mean": logits.mean(), "sum": (logits > 0).to(logits).sum()}
        numbers |= {"max": int(tenths.max()), "min": int(tenths.min())}
        for reduction, value in numbers.items():
            self.log(f"{prefix}_{reduction}", value, reduce_fx=reduction, sync_dist=True, **when)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.model(x)
        self._log_all("train", logits.detach(), on_step=True, on_epoch=True)
        self.train_accuracy(logits, y)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.model(batch[0])
        self._log_all("val", logits)
        self.val_accuracy(logits, batch[1])
        self.log("val_accuracy", self.val_accuracy)


def fit(name: str | None, root: str) -> dict[str, float]:
    directory = Path(root) / os.environ.get("RANK", "single")
    logger = CSVLogger(directory, name="logs", version=0)
    trainer, entry = trainer_of(name, logger=logger, log_every_n_steps=1, max_epochs=2)
    trainer.fit(make_module(Logging), *loaders_of(trainer, entry))
    return {n: float(v) for n, v in trainer.callback_metrics.items()}


def rows_in(directory: Path) -> list[dict[str, float]]:
    with open(directory / "logs" / "version_0" / "metrics.csv") as file:
        return [{n: float(v) for n, v in row.items() if v} for row in csv.DictReader(file)]


@pytest.mark.some("fsdp-2", "pipeline-gpipe-2", "tp-2")
@pytest.mark.parametrize("name", [*TYPICAL, "pipeline-2x2", "tp-2x2"])
def test_equals_a_single_device(
    workers: WorkerPool, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(variable, raising=False)
    metrics = fit(None, str(tmp_path))
    assert len(metrics) == 4 * 3 + 4 + 2
    ranks = workers.run(ENTRIES[name].devices, fit, name, str(tmp_path))
    for found in ranks:
        assert found == ranks[0], "each rank must know the same numbers"
    assert ranks[0] == pytest.approx(metrics, abs=TOLERANCE)
    expected, written = rows_in(tmp_path / "single"), rows_in(tmp_path / "0")
    assert len(written) == len(expected)
    for row, other in zip(written, expected, strict=True):
        assert row == pytest.approx(other, abs=TOLERANCE)
    assert len(list(tmp_path.rglob("metrics.csv"))) == 2, "only rank 0 may write, and one device"
