from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.precision.casts import HalfCasts, cast, half_copies, swapped_parameters
from lightning_dist.engine.precision.policy import HalfPrecision

BF16, FP32 = torch.bfloat16, torch.float32


class Spy(nn.Linear):
    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        self.seen = (x.dtype, self.weight.dtype)
        return super().forward(x) if scale is None else super().forward(x) * scale


class Norm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = (x.dtype, self.weight.dtype)
        return super().forward(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = Spy(4, 4), Norm(4), Spy(4, 4)
        self.register_buffer("positions", torch.ones(4))

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Any]:
        normed = self.norm(self.first(x, scale=x))
        y = self.last(normed + self.positions)  # a buffer is fp32, and so is the sum
        self.seen = (normed.dtype, y.dtype)
        return {"y": y, "ids": ids}


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()


def run(root: Root) -> dict[str, Any]:
    x = torch.ones(2, 4, dtype=torch.float64)
    return root.model(x, torch.tensor([1, 2]))


@pytest.mark.parametrize("keep", [("norm", "loss"), ("norm",)])
def test_each_module_meets_what_it_computes_in(keep: tuple[str, ...]) -> None:
    root, half = Root(), HalfPrecision(BF16, keep)
    masters = half.half_parameters(root).values()
    casts = HalfCasts(root, half)
    copies = half_copies(masters, BF16)
    with swapped_parameters(root, copies):
        output = run(root)
    model = root.model
    assert model.first.seen == model.last.seen == model.seen == (BF16, BF16)
    assert model.norm.seen == (FP32, FP32)
    assert output["y"].dtype == (FP32 if "loss" in keep else BF16)
    assert output["ids"].dtype == torch.int64
    output["y"].float().sum().backward()
    for parameter in root.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == FP32
    run(root)  # outside of a step nobody lends copies, and it still runs
    assert model.first.seen == model.last.seen == (FP32, FP32)
    casts.remove()
    root.model.float()(torch.ones(2, 4), torch.tensor([1]))
    assert model.norm.seen == (FP32, FP32)
    assert model.seen == (FP32, FP32)


def test_what_needs_no_cast_is_the_same() -> None:
    tree = {"x": torch.ones(2), "ids": torch.tensor([1])}
    assert cast(tree, FP32) is tree
    assert cast(tree, BF16)["x"].dtype == BF16


def test_copies_are_lent_and_given_back() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    before = dict(module.named_parameters(remove_duplicate=False))
    copies = half_copies([module[0].weight], BF16)
    with swapped_parameters(module, copies):
        assert module[0].weight is module[1].weight is copies[before["0.weight"]]
        assert module[0].bias is before["0.bias"]
    after = dict(module.named_parameters(remove_duplicate=False))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)


def test_a_shared_copy_gets_one_gradient_in_half_precision() -> None:
    module = nn.Linear(2, 2, bias=False)
    copies = half_copies([module.weight], BF16)
    with swapped_parameters(module, copies):
        x = torch.tensor([[1.0, 2.0**-8]], dtype=BF16)
        (module(x) + module(x.flip(1))).sum().backward()
    assert torch.equal(module.weight.grad, torch.ones(2, 2))  # 1 + 2**-8 is 1 in bf16


class MSELoss(nn.MSELoss):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.seen = (x.dtype, y.dtype)
        return super().forward(x, y)


class Normalised(nn.Module):
    """Kept modules without weights, and a loss inside of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.after = nn.Identity()
        self.loss = MSELoss()

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(self.linear(x))
        self.seen = normed.dtype
        loss = self.loss(normed, normed.detach() * 0.5)
        self.loss_dtype = loss.dtype
        return loss


def test_what_has_no_weights_is_kept_too() -> None:
    root, half = nn.Module(), HalfPrecision(BF16)
    root.model = Normalised()
    casts = HalfCasts(root, half)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    given: list[torch.dtype] = []
    hook = root.model.norm.register_forward_pre_hook(lambda _, args: given.append(args[0].dtype))
    with swapped_parameters(root, half_copies(half.half_parameters(root).values(), BF16)):
        root.model(x)
    assert given == [FP32]
    assert root.model.seen == BF16
    assert root.model.loss.seen == (FP32, FP32)
    assert root.model.loss_dtype == FP32
    assert root.model.norm.running_mean.dtype == FP32
    casts.remove()
    hook.remove()
    assert not root.model.norm._forward_pre_hooks
