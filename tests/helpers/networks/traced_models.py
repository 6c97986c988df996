"""Models that are no sequence, written as any user would write them."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.networks.models import make_optimizer


class UNet(nn.Module):
    """Two levels: both ends of each skip connection may be stages apart."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.bottom = nn.Conv2d(4, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.join = nn.Conv2d(8, 4, 3, padding=1)
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.norm(self.down(x)), inplace=True)
        deep = torch.tanh(self.bottom(F.max_pool2d(skip, 2)))
        joined = self.join(torch.cat([self.up(deep), skip], 1))
        return self.head(torch.tanh(joined)) + x


class Residual(nn.Module):
    """A residual block that writes in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        out += x
        return self.relu(out)


class ResNet(nn.Module):
    """A small one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.ModuleList([Residual(4), Residual(4)])
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Task(L.LightningModule):
    """Calls one attribute, whose input is the example."""

    def __init__(self, net: type[nn.Module] = UNet) -> None:
        super().__init__()
        self.net = net()
        self.example_input_array = torch.zeros(1, 1, 8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.mse_loss(self.net(x), y))

    def configure_optimizers(self) -> Any:
        return make_optimizer("adamw", self.parameters())


class Pair(Task):
    """Its own forward is what runs: on two inputs, and into a dict."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)
        self.rate = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.out = nn.Linear(16, 8)
        self.register_buffer("shift", torch.linspace(-1, 1, 8))
        self.example_input_array = {"image": torch.zeros(2, 1, 8, 8), "level": torch.zeros(2, 8)}

    def forward(self, image: Tensor, *, level: Tensor, scale: float = 2.0) -> dict[str, Any]:
        left = torch.tanh(self.left(image)) + self.shift
        right = torch.tanh(self.right(level))[:, None, None] * self.rate
        mixed = left * right + self.shift
        both = torch.cat([mixed, right.expand_as(mixed)], -1)
        return {"image": scale * self.out(both), "kind": "pair"}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        output = self(level=y[:, 0, 0], image=x)
        assert output["kind"] == "pair"
        loss = F.mse_loss(output["image"], y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x, level=y[:, 0, 0])["image"], y))


def make_images(num_samples: int = 15, batch_size: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num_samples, 1, 8, 8, generator=generator, dtype=torch.float64)
    y = torch.roll(x, 1, -1).cumsum(-2)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)
