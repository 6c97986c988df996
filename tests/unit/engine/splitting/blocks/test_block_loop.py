"""Which lists of blocks a forward runs as a chain."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dist.engine.splitting.blocks.block_loop import loops_over


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.embed, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
        self.checkpointing = True


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


class Ordinary(Base):
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        length = tokens.shape[0]
        mask = torch.ones(length)
        x = self.embed(tokens)
        for block in self.blocks:
            if self.training and self.checkpointing:
                x = checkpoint(block, x, mask)
            else:
                x = block(x, mask)
        x = self.head(x)
        return F.cross_entropy(x.view(length), targets)


class OtherName(Base):
    def forward(module, x: Tensor) -> Tensor:  # noqa: N805
        x = module.embed(x)
        for block in module.blocks:
            if module.training:
                x = block(x)
        return x


class Rebound(Base):
    def forward(self, x: Tensor) -> Tensor:
        self = self.other  # type: ignore[assignment]  # noqa: PLW0642
        for block in self.blocks:
            x = block(x)
        return x


class SkipOfOtherName(Base):
    def forward(s, x: Tensor) -> Tensor:  # noqa: N805
        y = s.embed(x)
        for block in s.blocks:
            x = block(x)
        return x + y


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"h": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.parts.h:
            x = block(x)
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


class Experts(Base):
    def forward(self, x: Tensor) -> Tensor:
        out = x
        for expert in self.blocks:
            out = out + expert(x)
        return out


class Skip(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        skipped = x
        for block in self.blocks:
            x = block(x)
        return x + skipped


class Given(Base):
    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embed(x)
        for block in self.blocks:
            x = block(x, embedded)
        return x


class Residual(Base):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.relu(x + block(x))
        return x


class Dense(Base):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            before = x
            x = block(x)
            x = x + before
        return x


class Collected(Base):
    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for block in self.blocks:
            x = block(x)
            seen.append(x)
        return torch.stack(seen)


class CollectedBefore(Base):
    def forward(self, x: Tensor) -> Tensor:
        seen = []
        seen.append(self.embed(x))
        for block in self.blocks:
            x = block(x)
        return x + seen[0]


class Stored(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.embedded = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x + self.embedded


class BetweenBlocks(Base):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x = self.embed(x)
        return x


class Twice(Base):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        for block in self.blocks:
            x = block(x)
        return x


class Again(Base):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.blocks[0](x)


class OnBothSides(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.embed(x)


class WeightBehind(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight

    def enter(self, x: Tensor) -> Tensor:
        return self.embed(x)


class Conditioned(nn.Module):
    """Passes a second value that it has computed to the part with the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.patch, self.head = (nn.Linear(2, 2) for _ in range(3))
        self.body: nn.Module = Given()

    def forward(self, x: Tensor) -> Tensor:
        condition = self.time(x)
        return self.head(self.body(self.patch(x), condition))


class Masked(Conditioned):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(len(x))
        return self.head(self.body(self.patch(x), mask))


class InMethods(Base):
    """Reads a weight in one method ahead of the blocks, and in another one behind them."""

    def features(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        return x @ self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.features(x))


class InTwoMethods(InMethods):
    def logits(self, x: Tensor) -> Tensor:
        return self.head(x.to(self.embed.weight.dtype))


class OfAProperty(InMethods):
    @property
    def table(self) -> Tensor:
        return self.embed.weight

    def logits(self, x: Tensor) -> Tensor:
        return x @ self.table


class Wrapped(nn.Module):
    """Calls methods of a part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.part.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.part.logits(x)


class WithoutWeights(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embed(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class HandsItselfOut(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = getattr(self, "embed")(x)  # noqa: B009
        for block in self.blocks:
            x = block(x)
        return x


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Plain()
        self.embed = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.encoder(x) + x


def test_a_loop_that_hands_on_is_a_chain() -> None:
    assert all(loops_over(model(), "blocks") for model in (Plain, Counted, Pair, Ordinary))
    assert loops_over(OtherName(), "blocks")
    assert loops_over(Held(), "parts.h")
    assert all(loops_over(model(), "blocks") for model in (InTwoMethods, WithoutWeights))


def test_branches_are_no_chain() -> None:
    others = (Base, Branches, Comprehension, Experts, Twice, Again)
    assert not any(loops_over(model(), "blocks") for model in others)


def test_nothing_passes_by_a_chain() -> None:
    others = (Skip, Given, Residual, Dense, Collected, CollectedBefore, Stored, BetweenBlocks)
    others += (SkipOfOtherName, Rebound, OnBothSides, WeightBehind, InMethods, OfAProperty)
    assert not any(loops_over(model(), "blocks") for model in others)
    assert not loops_over(HandsItselfOut(), "blocks")
    assert not loops_over(Wrapped(InMethods()), "blocks")


def test_only_the_forward_of_the_whole_model_counts() -> None:
    assert not loops_over(Inner(), "encoder.blocks")


def test_a_part_with_the_blocks_is_given_nothing_else_that_was_computed() -> None:
    model = Masked()
    model.body = Plain()
    assert loops_over(model, "body.blocks")
    model = Conditioned()
    model.body = Plain()
    assert not loops_over(model, "body.blocks")
