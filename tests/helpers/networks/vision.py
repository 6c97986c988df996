"""Vision transformers as tutorials have them, with parameters beside their blocks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Vision(nn.Module):
    """A vision transformer as tutorials have it."""

    def __init__(self, blocks: type[nn.Sequential | nn.ModuleList] = nn.ModuleList) -> None:
        super().__init__()
        torch.manual_seed(3)
        made = [nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True) for _ in range(5)]
        self.blocks = nn.Sequential(*made) if blocks is nn.Sequential else nn.ModuleList(made)
        self.patches = nn.Linear(3, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.places = nn.Parameter(torch.randn(1, 7, 4))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(4))
        self.double()

    def embed(self, x: Tensor) -> Tensor:
        hidden = torch.cat([self.token.expand(len(x), -1, -1), self.patches(x)], dim=1)
        return hidden + self.places[:, : hidden.shape[1]]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden)[:, 0] * self.scale)


class Called(Vision):
    def __init__(self) -> None:
        super().__init__(nn.Sequential)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.patches(x) + self.places[:, : x.shape[1]]
        token = self.token.expand(len(x), -1, -1)
        hidden = self.norm(self.blocks(torch.cat([token, hidden], dim=1))[:, 0])
        return self.head(hidden * self.scale)


class User(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    images, wanted = batch
    return F.cross_entropy(model(images), wanted)


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(4)
    images = torch.randn(3, 4, 6, 3, generator=generator, dtype=torch.float64)
    return [(each, torch.randint(3, (4,), generator=generator)) for each in images]
