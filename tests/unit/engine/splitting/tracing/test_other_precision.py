"""Graphs that are traced on the CPU in fp32 run under autocast and on other devices."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.splitting.tracing.sequence import TracedLayers


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weights = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.between(self.first(x)))
        return result

    def between(self, x: Tensor) -> Tensor:
        return x


class LeastNumber(Two):
    def between(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[0], 4, device=x.device).triu(1).bool()
        scores = x.masked_fill(mask, torch.finfo(x.dtype).min)
        return x * scores.softmax(-1)


class DecidesByDtype(Two):
    def between(self, x: Tensor) -> Tensor:
        return x * 2 if x.dtype == torch.bfloat16 else x


class CastsWithoutGradient(Two):
    def between(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            norm = x.detach().float().norm(dim=-1, keepdim=True)
            norm = norm + torch.ones(x.shape[0], 1, device=x.device)
        return x / norm


class Nested(Two):
    """A block in a block, in the dtype of the parameters."""

    def between(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            y = x.float() @ self.first.weight
            with torch.no_grad():
                scale = y.square().mean() + torch.ones((), device=x.device)
            return y / scale


class Constants(Two):
    def between(self, x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device) + self.weights.to(x.device)


@pytest.mark.parametrize(
    "class_", [LeastNumber, DecidesByDtype, CastsWithoutGradient, Nested, Constants]
)
def test_computes_what_the_module_does(class_: type[Two]) -> None:
    module = class_()
    original = copy.deepcopy(module)
    x = torch.linspace(-1, 2, 12).reshape(3, 4)
    sequence = TracedLayers(module, (x,), {})
    half = torch.autocast("cpu", dtype=torch.bfloat16)
    for context in (nullcontext(), half, nullcontext()):
        with context:
            found, expected = module(x), original(x)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    module.to("meta")
    for layer in sequence.module:
        layer.to("meta")
    output = module(x.to("meta"))
    assert (output.shape, output.device.type) == ((3, 4), "meta")
