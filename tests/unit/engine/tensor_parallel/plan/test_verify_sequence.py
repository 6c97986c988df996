"""Blocks that treat each position by itself, but for their sharded layers, and others."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist.engine.tensor_parallel.config import resolve_plan
from lightning_dist.engine.tensor_parallel.plan.verify_sequence import check_positions

WIDTH, HEADS, TP = 8, 2, 2
PLAN = {
    "*.attention.*": "colwise",
    "*.attention.out": "rowwise",
    "*.mlp.up": "colwise",
    "*.mlp.down": "rowwise",
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        seen = x if memory is None else memory
        projected = self.q(x), self.k(seen), self.v(seen)
        q, k, v = (p.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in projected)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        summed: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return summed


class Block(nn.Module):
    """Does something with the activation before it attends, and drops some of it behind."""

    def __init__(self, before: Callable[[Tensor], Tensor], *, crosses: bool = False) -> None:
        super().__init__()
        self.before = before
        self.attention = Attention()
        self.mlp = nn.ModuleDict({"up": nn.Linear(WIDTH, 12), "down": nn.Linear(12, WIDTH)})
        self.dropout = nn.Dropout(0.5)
        self.crosses = crosses

    def forward(self, x: Tensor) -> Tensor:
        before = self.before(x)
        mixed = self.attention(before, x) if self.crosses else self.attention(before)
        x = x + self.dropout(mixed)
        summed: Tensor = x + self.mlp["down"](self.mlp["up"](x).relu())
        return summed


class Counting(Block):
    """Writes into a buffer, and draws a number that it has no use for."""

    num_calls: Tensor

    def __init__(self, before: Callable[[Tensor], Tensor]) -> None:
        super().__init__(before)
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        random.random()
        return super().forward(x)


class Pooled(Block):
    """Returns a number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean()


class BatchNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def check(block: nn.Module, plan: dict[str, str] = PLAN) -> None:
    model = nn.ModuleList([block, deepcopy(block)])
    check_positions(model, ["0", "1"], resolve_plan(model, plan), TP)


@pytest.mark.parametrize(
    "before", [nn.LayerNorm(WIDTH), F.gelu, lambda x: x / x.norm(dim=-1, keepdim=True)]
)
def test_what_looks_at_one_position_passes(before: Callable[[Tensor], Tensor]) -> None:
    block = Counting(before)
    numbers, drawn = torch.get_rng_state(), random.getstate()
    check(block)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert random.getstate() == drawn
    assert block.num_calls == 0


@pytest.mark.parametrize(
    "before",
    [
        BatchNorm(WIDTH),
        lambda x: x - x.mean(1, keepdim=True),
        lambda x: x.roll(1, 1),
        lambda x: x.cumsum(1),
        lambda x: torch.fft.fft(x, dim=1).real,
        lambda x: x + torch.arange(x.shape[1])[:, None],
        lambda x: x.view(-1, 4, WIDTH),
    ],
)
def test_what_looks_at_others_does_not(before: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=r"for '0', a Block, which .* part of it"):
        check(Block(before))


def test_what_is_no_sequence_any_more_does_not() -> None:
    with pytest.raises(ValueError, match="computes something else with a part of it"):
        check(Pooled(nn.LayerNorm(WIDTH)))


def test_a_second_activation_is_not_whole() -> None:
    with pytest.raises(ValueError, match="computes something else with a part of it"):
        check(Block(nn.LayerNorm(WIDTH), crosses=True))


def test_layers_named_replicate_are_not_believed() -> None:
    plan = {**PLAN, "*.attention.*": "replicate", "*.attention.out": "replicate"}
    with pytest.raises(ValueError, match="computes something else with a part of it"):
        check(Block(nn.LayerNorm(WIDTH)), plan)
