"""What changes while a traced model trains changes its forward as on a single device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import PipelineStrategy
from tests.helpers.networks.models import make_optimizer, make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool

TOLERANCE = 1e-12


class Net(nn.Module):
    """Reads all sorts of things, and does something else for one sample and without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self._temperature = 1.0
        self.config = SimpleNamespace(rates=[1.0, 1.0])
        self.scale = torch.ones((), dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x) / self._temperature)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.5).add_(0.5 * hidden.mean(0))
        hidden = self.second(hidden) * self.config.rates[1]
        if not self.training:
            hidden = hidden - self.mean
        if x.shape[0] == 1:
            hidden = hidden * 3
        result: Tensor = self.third(hidden) * self.scale
        return result if torch.is_grad_enabled() else 2 * result


class Anneals(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = Net().double()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net._temperature = 1.0 + batch_idx
        self.net.config.rates[1] = 1.0 / (1 + batch_idx)

    def on_train_epoch_start(self) -> None:
        self.net.scale.fill_(1.0 + self.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return make_optimizer("adamw", self.parameters())


def fit(devices: int) -> tuple[dict[str, Tensor], float]:
    module = Anneals()
    asked = "auto" if devices == 1 else PipelineStrategy(layers="trace", num_microbatches=1)
    trainer = make_trainer(devices=devices, strategy=asked, max_epochs=2)
    x = torch.linspace(-1, 1, 9 * 4, dtype=torch.float64).reshape(9, 4).sin()
    loader = DataLoader(TensorDataset(x, x.flip(0)), batch_size=4)  # of 4, 4 and 1 samples
    trainer.fit(module, loader, loader)
    buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
    return {**state_of(module), **buffers}, float(trainer.callback_metrics["val_loss"])


def test_equals_a_single_device(workers: WorkerPool) -> None:
    state, loss = workers.run(1, fit, 1)[0]
    ranks = workers.run(2, fit, 2, timeout=240.0)
    for name, value in state.items():
        found = [held[name] for held, _ in ranks if name in held]
        assert found, name
        assert all(float((each - value).abs().max()) < TOLERANCE for each in found), name
    assert [found for _, found in ranks] == pytest.approx([loss, loss], abs=TOLERANCE)
