"""Layers that keep a rank busy without a processor, so that few cores serve many ranks."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn


class Sleep(torch.autograd.Function):
    """Keeps its rank busy for a while, without a processor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None, None


class SleepingLayer(nn.Module):
    """Sleeps for its forward, as long for its inputs' gradient, and as long for its weight's.

    Args:
        seconds: How long it sleeps each time.
        shape: Of each of its two parameters; FSDP2 refuses those without a dimension.
    """

    def __init__(self, seconds: float, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(shape))  # so that the first stage has all parts, too
        self.scale = nn.Parameter(torch.ones(shape))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        x = Sleep.apply(x + self.shift, self.seconds, self.seconds)
        return x * Sleep.apply(self.scale, 0.0, self.seconds)  # type: ignore[no-any-return]
