"""Layers of which plans are found, and what is found of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.engine.tensor_parallel.plan.discovery import find_plan

WIDTH = 12
MLP = {"mlp.up": "colwise", "mlp.down": "rowwise"}
ATTENTION = {
    "attention.q": "colwise",
    "attention.k": "colwise",
    "attention.v": "colwise",
    "attention.o": "rowwise",
}


def plan_of(module: nn.Module, tp_size: int = 1) -> dict[str, str]:
    return {name: style.value for name, style in find_plan(module, tp_size).styles.items()}


def holder(**children: Any) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        setattr(module, name, child)
    return module


class Separate(nn.Module):
    """Query, key and value apart."""

    def __init__(self, kv_size: int = WIDTH, **attributes: Any) -> None:
        super().__init__()
        self.num_heads = 4
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, kv_size)
        self.v = nn.Linear(WIDTH, kv_size)
        self.o = nn.Linear(WIDTH, WIDTH)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Adapted(nn.Linear):
    """Computes more than an nn.Linear does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


def mlp(hidden: int = 20, **more: nn.Module) -> nn.Module:
    return holder(up=nn.Linear(WIDTH, hidden), **more, down=nn.Linear(hidden, WIDTH))
