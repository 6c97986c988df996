"""Small modules and data for the tests, written as any user would write them."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_dist.engine.tensors.dtensor import whole
from tests.helpers.networks.schedule_free import ScheduleFree


class ConvLayer(nn.Module):
    """Norm, convolution and linear with a skip: what weight versions can go wrong with.

    The norm comes first: behind the convolution it would cancel the bias's gradient to rounding
    noise, which AdamW's division blows up.
    """

    def __init__(self, dropout: float = 0.0, channels: int = 2, length: int = 6) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.conv = nn.Conv1d(channels, channels, 3, padding=1)
        self.norm = nn.LayerNorm(length)
        self.linear = nn.Linear(length, length)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear(torch.tanh(self.conv(self.norm(x)))))


def make_layers(count: int = 6, dropout: float = 0.0) -> nn.Sequential:
    layers = (ConvLayer(dropout) for _ in range(count))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 3))


def make_data(num_samples: int, seed: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, 2, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (num_samples,), generator=generator)
    return TensorDataset(x, y)


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)
    if name == "schedule_free":
        return ScheduleFree(parameters)
    if name == "adagrad":  # has its state from the start
        return torch.optim.Adagrad(parameters, lr=0.05, initial_accumulator_value=0.1)
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


class Classifier(L.LightningModule):
    """An ordinary LightningModule that knows nothing of pipelines."""

    def __init__(
        self,
        optimizer: str = "sgd",
        schedule_lr: bool = False,
        dropout: float = 0.0,
        depth: int = 6,
    ) -> None:
        super().__init__()
        self.model = make_layers(depth, dropout)
        self.optimizer = optimizer
        self.schedule_lr = schedule_lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.model(x)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_correct", (logits.argmax(-1) == y).double().sum(), reduce_fx="sum")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self.model(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.optimizer, self.parameters())
        if not self.schedule_lr:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def make_module(module: type[L.LightningModule] = Classifier, **kwargs: Any) -> Any:
    """Builds a module in float64 with the same weights in each process."""
    torch.manual_seed(7)
    return module(**kwargs).double()


def make_loader(num_samples: int = 46, batch_size: int = 8, **kwargs: Any) -> DataLoader:
    return DataLoader(make_data(num_samples), batch_size=batch_size, **kwargs)


def share_of(rank: int, num_samples: int, num_replicas: int = 2) -> DataLoader:
    """One replica's share of the data, in batches of four."""
    own = range(rank, num_samples, num_replicas)
    return DataLoader(Subset(make_data(num_samples), own), batch_size=4)


def make_trainer(**kwargs: Any) -> L.Trainer:
    """Builds a quiet trainer."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
    }
    return L.Trainer(**{**defaults, **kwargs})


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """What this rank holds, shards made whole, in a form that outlives the worker's process."""
    return {name: whole(p.detach()).clone() for name, p in module.named_parameters()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compares what two runs have trained, to the last digits of float64."""
    assert found.keys() == expected.keys()
    worst = max((float((found[n] - value).abs().max()), n) for n, value in expected.items())
    assert worst[0] < 1e-12, worst
