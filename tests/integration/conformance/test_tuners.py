"""Lightning's tuners find what they find on one device, and leave nothing behind."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from torch import Tensor
from torch.optim import SGD
from torch.utils.data import DataLoader

from lightning_dist import DDPStrategy, FSDPStrategy, PipelineStrategy
from tests.helpers.models import Classifier, make_data, make_module, make_trainer, state_of
from tests.helpers.workers import CaseFailedError, WorkerPool

NUM_SAMPLES = 32
NUM_TRAINING = 7
LATE = ("pipedream", "pipedream_2bw")
STRATEGIES = ("ddp", "fsdp", "1f1b", *LATE)


class Tuned(Classifier):
    """Has a rate and a batch size to be found; all replicas read the same."""

    def __init__(self, lr: float = 0.05, batch_size: int = 4) -> None:
        super().__init__()
        self.lr, self.batch_size = lr, batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(make_data(NUM_SAMPLES), batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(make_data(8), batch_size=8)

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=self.lr, momentum=0.9)


class FindsRate(LearningRateFinder):
    """Keeps what was found."""

    def __init__(self) -> None:
        super().__init__(1e-3, 0.3, NUM_TRAINING, early_stop_threshold=None, attr_name="lr")
        self.losses: list[float] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        assert self.optimal_lr is not None
        self.losses = self.optimal_lr.results["loss"]


def strategy_of(name: str) -> Any:
    if name == "one":
        return "auto"
    replicated = {"ddp": DDPStrategy, "fsdp": FSDPStrategy}
    return replicated[name]() if name in replicated else PipelineStrategy(schedule=name)  # type: ignore[arg-type]


Found = tuple[float, list[float], dict[str, Tensor]]


def fit(name: str, folder: str, callbacks: list[L.Callback], lr: float) -> Found:
    """Gives the rate, the finder's losses, and the weights behind training."""
    module = make_module(Tuned, lr=lr)
    trainer = make_trainer(
        devices=1 if name == "one" else 2,
        strategy=strategy_of(name),
        callbacks=callbacks,
        default_root_dir=folder,
        max_epochs=2,
    )
    trainer.fit(module)
    losses = [loss for finder in callbacks for loss in getattr(finder, "losses", [])]
    return module.lr, losses, state_of(module)


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("name", STRATEGIES)
def test_training_goes_on_from_restored_weights(
    workers: WorkerPool, tmp_path: Path, name: str
) -> None:
    found = workers.run(2, fit, name, str(tmp_path), [FindsRate()], 0.05)
    lr, losses, _ = found[0]
    fresh = workers.run(2, fit, name, str(tmp_path), [], lr)
    for tuned, untuned in zip(found, fresh, strict=True):
        assert tuned[:2] == (lr, losses)
        assert difference(tuned[2], untuned[2]) == 0.0
    assert len(losses) == NUM_TRAINING
    assert all(map(math.isfinite, losses))
    if name not in LATE:
        ((expected, expected_losses, _),) = workers.run(
            1, fit, "one", str(tmp_path), [FindsRate()], 0.05
        )
        assert lr == pytest.approx(expected)
        assert losses == pytest.approx(expected_losses)


@pytest.mark.parametrize("name", STRATEGIES)
def test_lightning_refuses_to_find_batch_sizes_on_all_ranks(
    workers: WorkerPool, tmp_path: Path, name: str
) -> None:
    with pytest.raises(CaseFailedError, match="not supported with distributed strategies"):
        workers.run(2, fit, name, str(tmp_path), [BatchSizeFinder()], 0.05)
