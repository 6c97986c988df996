"""Which lists of blocks a forward runs as a chain."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dist.block_loop import loops_over


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


class Plain(Base):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Counted(Base):
    def forward(self, x: Tensor) -> Tensor:
        for _, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Pair(Base):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return x


class Branches(Base):
    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for block in self.blocks:
            y = block(x)
            total = total + y
        return total


class Comprehension(Base):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([block(x) for block in self.blocks])


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.encoder = inner


class OuterLoop(Outer):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.encoder.blocks:
            x = block(x)
        return x


def test_a_loop_that_hands_on_is_a_chain() -> None:
    assert all(loops_over(model(), "blocks") for model in (Plain, Counted, Pair))


def test_branches_are_no_chain() -> None:
    assert not any(loops_over(model(), "blocks") for model in (Branches, Comprehension, Base))


def test_the_loop_may_be_in_any_part_around_the_list() -> None:
    assert loops_over(Outer(Plain()), "encoder.blocks")
    assert loops_over(OuterLoop(Base()), "encoder.blocks")
    assert not loops_over(Outer(Branches()), "encoder.blocks")
