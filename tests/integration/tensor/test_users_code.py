"""What users' code computes of gradients and logits of tensor-parallel layers: as on one device."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist import TensorParallelStrategy
from tests.helpers.networks.models import (
    assert_equal,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool

State = dict[str, Tensor]
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head": "colwise_gather"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(6, 4)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)).mean(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.logits(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Clips(Net):
    """Clips by torch's function, shards and whole parameters together."""

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class Branches(Net):
    """Decides by a number of each gradient, and scales by one, as LARS does."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            largest = parameter.grad.abs().max().item()
            if (parameter.grad == largest).any():  # where the largest is positive
                parameter.grad.mul_(parameter.detach().norm().item() / (1 + largest))


class Early(Net):
    """Changes gradients as soon as they are there, not by a factor, which AdamW would not see."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad.pow_(3)


class OwnLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor) -> Tensor:
        shares = logits.softmax(-1)
        ctx.save_for_backward(shares, y)
        return -shares[range(len(y)), y].log().mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        shares, y = ctx.saved_tensors
        return gradient * (shares - F.one_hot(y, shares.shape[-1])) / len(y), None


class Fused(Net):
    """Has a loss with a backward of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.head(self.blocks(batch[0])[:, 0])  # in shards, as they are
        return OwnLoss.apply(logits, batch[1])


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.block, self.head = nn.Embedding(8, 6), Block(), nn.Linear(6, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.tokens(ids)))


class Taught(Net):
    """Follows an average of itself, which has a vocabulary of its own."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks, self.head
        self.student, self.teacher = Language(), Language().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch[0].argmax(-1)
        with torch.no_grad():
            target = self.teacher(ids).softmax(-1)
        return F.cross_entropy(self.student(ids).flatten(0, 1), target.flatten(0, 1))

    def on_train_batch_end(self, *_: Any) -> None:
        pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
        for average, new in pairs:
            average.data.mul_(0.5).add_(new.detach(), alpha=0.5)


MODULES: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "clips": (Clips, {}),
    "branches": (Branches, {}),
    "early": (Early, {"sequence_parallel": True}),
    "own loss": (Fused, {"loss_parallel": True}),
    "taught": (Taught, {"plan": "auto"}),
}


def fit(name: str, devices: int) -> State:
    class_, options = MODULES[name]
    module = make_module(class_)
    strategy: Any = "auto"
    if devices > 1:
        strategy = TensorParallelStrategy(**{"plan": PLAN, **options})
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=2)
    trainer.fit(module, make_loader(24))
    return state_of(module)


@pytest.mark.some("clips", "own loss", "taught")
@pytest.mark.parametrize("name", MODULES)
def test_equals_one_device(workers: WorkerPool, name: str) -> None:
    (expected,) = workers.run(1, fit, name, 1)
    for state in workers.run(2, fit, name, 2):
        assert_equal(state, expected)
