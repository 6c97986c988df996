"""What a step, or a layer's forward, writes into weights stays there, as on one device."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dist import FSDPStrategy
from lightning_dist.wrap import ByClass
from tests.helpers.networks.models import make_loader, make_module, make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool


class Masked(nn.Module):
    """Multiplies a mask onto its own weight, as MADE and PixelCNN do."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.register_buffer("mask", torch.tril(torch.ones(size, size)))

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data *= self.mask
        result: Tensor = self.linear(x)
        return result


class Student(L.LightningModule):
    """Has layers that write, and a teacher that follows in each step, or between its passes.

    A teacher that follows between the passes is called there, too.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("total", torch.zeros(()))
        self.model = nn.Sequential(
            nn.Flatten(), nn.Linear(12, 5), Masked(5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)
        )
        self.scale = nn.Parameter(torch.ones(3))
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)
        self.teacher_scale = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)

    @torch.no_grad()
    def _follow(self) -> None:
        pairs = [*zip(self.model.parameters(), self.teacher.parameters(), strict=True)]
        for own, slow in [*pairs, (self.scale, self.teacher_scale)]:
            if self.way == "in place":
                slow.mul_(0.9).add_(own, alpha=0.1)
            elif self.way != "anew" or slow is not self.teacher_scale:
                slow.data.mul_(0.9).add_(own.data, alpha=0.1)
            else:  # of a shard, torch ignores it
                slow.data = slow.data * 0.9 + own.data * 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.way in ("in place", "by data", "anew"):
            self._follow()
        logits = self.model(batch[0]) * self.scale
        with torch.no_grad():
            wanted = self.teacher(batch[0]) * self.teacher_scale
        if self.way == "behind":
            self._follow()
        return F.cross_entropy(logits, batch[1]) + (logits - wanted).square().mean()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.way == "between":
            self._follow()
            x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(2, 12)
            self.total += self.teacher(x).abs().sum()

    def on_before_backward(self, loss: Tensor) -> None:
        if self.way == "ahead":
            self._follow()

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


STRATEGIES: dict[str, Any] = {
    "one": lambda: "auto",
    "shards": FSDPStrategy,
    "kept": lambda: FSDPStrategy(reshard_after_forward=False),
    "units": lambda: FSDPStrategy(ByClass(["Masked"]), shard="gradients"),
    "offloaded": lambda: FSDPStrategy(offload="cpu"),
}


def fit(name: str, way: str) -> dict[str, Tensor]:
    strategy = STRATEGIES[name]()
    trainer = make_trainer(devices=1 if name == "one" else 2, strategy=strategy, max_epochs=2)
    module = make_module(Student, way=way)
    trainer.fit(module, make_loader(24))
    return {**state_of(module), "total": module.total.clone()}


@pytest.mark.some(
    "ahead-kept",
    "anew-shards",
    "between-offloaded",
    "between-shards",
    "between-units",
    "by data-shards",
)
@pytest.mark.parametrize("name", ["shards", "kept", "units", "offloaded"])
@pytest.mark.parametrize("way", ["in place", "by data", "anew", "between", "ahead", "behind"])
def test_written_weights_stay(workers: WorkerPool, name: str, way: str) -> None:
    (expected,) = workers.run(1, fit, "one", way)
    for found in workers.run(2, fit, name, way):  # both ranks read the same batches
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-12, msg=key)


class ByHand(L.LightningModule):
    """Writes into its teacher behind a call, ahead of the backward or the update, or at the end."""

    automatic_optimization = False

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), Masked(5), nn.Linear(5, 3))
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    @torch.no_grad()
    def _follow(self) -> None:
        for own, slow in zip(self.model.parameters(), self.teacher.parameters(), strict=True):
            slow.mul_(0.9).add_(own, alpha=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        logits = self.model(batch[0])
        with torch.no_grad():
            wanted = self.teacher(batch[0])
        if self.way == "behind the calls":
            self._follow()
        optimizer.zero_grad()
        loss = F.cross_entropy(logits, batch[1]) + (logits - wanted).square().mean()
        self.manual_backward(loss)
        if self.way == "ahead of the update":
            with torch.no_grad():
                self.teacher(batch[0])
                for parameter in self.teacher.parameters():
                    parameter.mul_(0.5)
        optimizer.step()
        if self.way == "at the end":
            with torch.no_grad():
                self.model(batch[0]), self.teacher(batch[0])
            self._follow()

    def on_before_backward(self, loss: Tensor) -> None:
        if self.way == "ahead":
            self._follow()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)


def fit_by_hand(name: str, way: str) -> dict[str, Tensor]:
    strategy = STRATEGIES[name]()
    trainer = make_trainer(devices=1 if name == "one" else 2, strategy=strategy, max_epochs=2)
    module = make_module(ByHand, way=way)
    trainer.fit(module, make_loader(24))
    return state_of(module)


@pytest.mark.some("behind the calls", "ahead", "ahead of the update")
@pytest.mark.parametrize("way", ["behind the calls", "ahead", "ahead of the update", "at the end"])
def test_written_weights_stay_in_steps_by_hand(workers: WorkerPool, way: str) -> None:
    (expected,) = workers.run(1, fit_by_hand, "one", way)
    for found in workers.run(2, fit_by_hand, "kept", way):
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-12, msg=key)


class Recomputed(L.LightningModule):
    """Writes between its passes into a layer that the backward recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(12, 5), Masked(5), nn.Linear(5, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = torch.tanh(self.first(batch[0].flatten(1)))
        h = checkpoint(self._scaled, h, use_reentrant=False)
        return F.cross_entropy(self.last(h), batch[1])

    def _scaled(self, h: Tensor) -> Tensor:
        # The product keeps a tensor, so that the recomputation goes on to the layer's end.
        result: Tensor = self.block(h) * h.detach()
        return result

    @torch.no_grad()
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.block.linear.bias.mul_(0.5)  # on which no gradient of the layer depends

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_recomputed(name: str) -> dict[str, Tensor]:
    devices = 1 if name == "one" else 2
    trainer = make_trainer(devices=devices, strategy=STRATEGIES[name](), max_epochs=2)
    module = make_module(Recomputed)
    trainer.fit(module, make_loader(24))
    return state_of(module)


def test_a_recomputation_leaves_what_hooks_have_written(workers: WorkerPool) -> None:
    (expected,) = workers.run(1, fit_recomputed, "one")
    for found in workers.run(2, fit_recomputed, "units"):
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-12, msg=key)
