"""Training that a step or a callback ends early ends on all ranks at once, with all its metrics."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch.nn.functional as F
from torch import Tensor

from lightning_dist import PipelineStrategy
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_optimizer,
    make_trainer,
)
from tests.helpers.oracle import train_sequentially
from tests.helpers.processes.workers import WorkerPool

AT_BATCH = 2


class StopsItself(Classifier):
    """Looks at its loss and has enough; only the last stage comes so far."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == AT_BATCH and loss.item() < 100:
            self.trainer.should_stop = True
        return loss


class StopAfterBatch(L.Callback):
    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == AT_BATCH:
            trainer.should_stop = True

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seen.append(float(trainer.callback_metrics["train_loss_epoch"]))


def fit_until_stopped(devices: int, who: str, strategy: dict[str, Any] | None) -> tuple[int, float]:
    module = make_module(StopsItself if who == "step" else Classifier)
    trainer = make_trainer(
        devices=devices,
        strategy="auto" if strategy is None else PipelineStrategy(**strategy),
        callbacks=[StopAfterBatch()] if who == "callback" else [],
        max_epochs=2,
    )
    trainer.fit(module, make_loader(80), make_loader(8))
    return trainer.global_step, float(trainer.callback_metrics["train_loss_epoch"])


def fit_batches(num_batches: int) -> float:
    """Trains by the asynchronous schedule for so many batches, without being stopped."""
    trainer = make_trainer(
        devices=2, strategy=PipelineStrategy(schedule="pipedream"), limit_train_batches=num_batches
    )
    trainer.fit(make_module(), make_loader(80), make_loader(8))
    return float(trainer.callback_metrics["train_loss_epoch"])


def fit_validating(every: int) -> tuple[list[float], float]:
    """Gives the loss of the latest batch as each validation starts, and the epoch's mean."""
    module = make_module()
    trainer = make_trainer(
        devices=2,
        strategy=PipelineStrategy(schedule="pipedream", partition=[4, 4]),
        val_check_interval=every,
        num_sanity_val_steps=0,
    )
    latest: list[float] = []
    module.on_validation_start = lambda: latest.append(
        float(trainer.callback_metrics["train_loss_step"])
    )
    trainer.fit(module, make_loader(80), make_loader(8))
    return latest, float(trainer.callback_metrics["train_loss_epoch"])


def test_a_validation_within_an_epoch_sees_and_loses_no_loss(workers: WorkerPool) -> None:
    layers = make_module().model
    stages = [layers[:4], layers[4:]]
    losses = train_sequentially(
        stages,
        [make_optimizer("sgd", stage.parameters()) for stage in stages],
        list(make_loader(80)),
        F.cross_entropy,
        drains=(5,),
        weight_versions="stash",
    )
    for latest, mean in workers.run(2, fit_validating, 5):
        assert latest == pytest.approx([losses[4], losses[9]], rel=1e-12)
        assert mean == pytest.approx(sum(losses) / 10, rel=1e-12)


@pytest.mark.parametrize("who", ["step", "callback"])
def test_a_synchronous_schedule_stops_where_a_single_device_does(
    workers: WorkerPool, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected = fit_until_stopped(1, who, None)
    assert expected[0] == AT_BATCH + 1
    for steps, loss in workers.run(2, fit_until_stopped, 2, who, {"schedule": "1f1b"}):
        assert steps == expected[0]
        assert loss == pytest.approx(expected[1], rel=1e-12)


@pytest.mark.some("callback-3")
@pytest.mark.parametrize(("who", "num_batches"), [("step", AT_BATCH + 2), ("callback", 3)])
def test_an_asynchronous_schedule_stops_at_one_batch(
    workers: WorkerPool, who: str, num_batches: int
) -> None:
    expected = workers.run(2, fit_batches, num_batches)[0]
    for steps, loss in workers.run(2, fit_until_stopped, 2, who, {"schedule": "pipedream"}):
        assert steps == num_batches
        assert loss == pytest.approx(expected, rel=1e-12)
