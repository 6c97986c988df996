"""A frozen base in 8-bit integers with adapters on it, as quantised fine-tuning has."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import DDPStrategy, FSDPStrategy, PipelineStrategy
from tests.helpers.networks.models import make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool

STRATEGIES: dict[str, Callable[[], Any]] = {
    "one": lambda: "auto",
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "stages": lambda: PipelineStrategy(num_microbatches=2),
}


class QuantisedLinear(nn.Module):
    """A linear layer whose weights are integers and a scale, with an adapter of rank 2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        weight = torch.randn(width, width)
        self.scale = weight.abs().max().item() / 127
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), False)
        self.down = nn.Parameter(0.1 * torch.randn(2, width))
        self.up = nn.Parameter(0.1 * torch.randn(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale).T + x @ self.down.T @ self.up.T


class Adapted(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (layer for _ in range(4) for layer in (QuantisedLinear(8), nn.Tanh()))
        self.model = nn.Sequential(*layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.5)


def train(name: str, num_ranks: int, num_replicas: int) -> dict[str, Tensor]:
    data = torch.randn(32, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    own = data[int(os.environ["RANK"]) :: num_replicas] if num_replicas > 1 else data
    module = Adapted().double()
    trainer = make_trainer(devices=num_ranks, strategy=STRATEGIES[name]())
    trainer.fit(module, DataLoader(TensorDataset(own), batch_size=8 // num_replicas))
    return state_of(module)


@pytest.mark.some("stages-1")
@pytest.mark.parametrize(("name", "num_replicas"), [("ddp", 2), ("fsdp", 2), ("stages", 1)])
def test_adapters_on_integers_train_as_on_one_device(
    workers: WorkerPool, name: str, num_replicas: int
) -> None:
    (alone,) = workers.run(1, train, "one", 1, 1)
    parts = workers.run(2, train, name, 2, num_replicas)
    together = {key: value for part in parts for key, value in part.items()}
    assert alone["model.0.weight"].dtype == together["model.0.weight"].dtype == torch.int8
    for key, value in alone.items():
        torch.testing.assert_close(together[key], value, rtol=0, atol=1e-12)
