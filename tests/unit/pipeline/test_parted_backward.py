"""The two parts of a backward are the whole one; torch's private functions still do that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.pipeline.parted_backward import PartedBackward
from tests.helpers.models import ConvLayer


class Shared(nn.Module):
    """Uses one weight twice, and another not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(x)))


STAGES = {
    "layers": lambda: nn.Sequential(ConvLayer(), ConvLayer()),
    "ends in a view": lambda: nn.Sequential(ConvLayer(), nn.Flatten()),
    "no parameters": nn.Flatten,
    "a weight used twice": Shared,
    "dropout": lambda: nn.Sequential(ConvLayer(dropout=0.5), nn.ReLU(inplace=True)),
}


def prepared(name: str, *, first: bool) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    stage = STAGES[name]().double()
    x = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=not first)
    return stage, x, stage(x * 1)


@pytest.mark.parametrize("first", [True, False], ids=["first stage", "later stage"])
@pytest.mark.parametrize("name", STAGES)
def test_both_parts_are_the_whole(name: str, first: bool) -> None:
    stage, x, y = prepared(name, first=first)
    if y.requires_grad:
        y.backward(torch.ones_like(y))
    expected = [x.grad, *(p.grad for p in stage.parameters())]

    stage, x, y = prepared(name, first=first)
    for parameter in stage.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)  # of earlier batches
    outputs, inputs = ([y] if y.requires_grad else []), ([] if first else [x])
    parted = PartedBackward(
        outputs, [torch.ones_like(t) for t in outputs], inputs, dict(stage.named_parameters())
    )
    found_inputs = parted.run_inputs()
    found = [*(found_inputs or [None]), *parted.run_weights()]
    assert len(found) == len(expected)
    for actual, wanted in zip(found, expected, strict=True):
        assert (actual is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-14)
    assert x.grad is None
    assert all(bool((p.grad == 7.0).all()) for p in stage.parameters())


def test_the_first_part_computes_no_gradients_of_weights() -> None:
    seen: list[str] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, weight: Tensor) -> Tensor:
            return weight.clone()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:  # type: ignore[override]
            seen.append("weight")
            return gradient

    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(2, 4, requires_grad=True)
    y = torch.tanh(x @ Watched.apply(weight))
    parted = PartedBackward([y], [torch.ones_like(y)], [x], {"weight": weight})  # type: ignore[dict-item]
    parted.run_inputs()
    assert seen == []
    parted.run_weights()
    assert seen == ["weight"]
