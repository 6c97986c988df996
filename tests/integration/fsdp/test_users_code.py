"""What users' code does with arguments, lists of parameters and gradients: as on one device."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist import FSDPStrategy
from lightning_dist.wrap import ByClass
from tests.helpers.networks.models import (
    Classifier,
    assert_equal,
    make_loader,
    make_module,
    make_optimizer,
    make_trainer,
    share_of,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool

NUM_SAMPLES = 24
State = dict[str, Tensor]


class Routed(nn.Module):
    """Leaves what its router pays in a list of the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.router = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, paid: list[Tensor]) -> Tensor:
        shares = self.router(x).softmax(-1)
        paid.append(shares.square().mean())
        return x + shares[..., :1] * self.down(torch.tanh(self.up(x)))


class Up(nn.Module):
    """Takes the newest skip connection off a list."""

    def __init__(self) -> None:
        super().__init__()
        self.join = nn.Linear(12, 6)

    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        return torch.tanh(self.join(torch.cat([x, skips.pop()], dim=-1)))


class Noting(nn.Module):
    """Adds to a dict, and changes an entry of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, state: dict[str, Tensor]) -> Tensor:
        seen = self.linear(state["seen"])
        state["seen"] = torch.tanh(seen)
        state["number"] = state.get("number", torch.zeros((), dtype=seen.dtype)) + 1
        return seen


class Passing(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleList([Routed(), Routed()])
        self.up = nn.ModuleList([Up(), Up()])
        self.notes = nn.ModuleList([Noting(), Noting()])
        self.head = nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.flatten(1)[:, :6]
        paid: list[Tensor] = []
        skips: list[Tensor] = []
        for block in self.model:
            x = block(x, paid)
            skips.append(x)
        for block in self.up:
            x = block(x, skips)
        assert (len(paid), len(skips)) == (2, 0)
        state = {"seen": x}
        outputs = [block(state) for block in self.notes]
        assert float(state["number"]) == 2
        x = state["seen"] + outputs[0]
        return F.cross_entropy(self.head(x), y) + sum(paid)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


class Listed(Classifier):
    """Clips a list of parameters that it has made early, and skips some updates by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = [p for p in self.parameters() if p.dim() > 1]

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        nn.utils.clip_grad_norm_(self.matrices, 0.01)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        first, *_ = self.parameters()
        largest = max(float(p.grad.abs().max()) for p in self.parameters())
        if (first.grad.abs() >= largest / 3).any():  # of one rank's part only
            for parameter in self.parameters():
                parameter.grad.mul_(0.5)


class Scaled(Classifier):
    """Has a number to train, and changes gradients as soon as they are there."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]) * self.scale, batch[1])

    def on_after_backward(self) -> None:
        self.scale.grad.mul_(self.scale.grad.abs() / (self.scale.grad.abs() + 0.01))


class Adversarial(Classifier):
    """Takes a gradient by its input, and calls the model again."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch[0].clone().requires_grad_(), batch[1]
        loss = F.cross_entropy(self.model(x), y)
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=batch_idx > 0)
        again = F.cross_entropy(self.model(x.detach() + 0.1 * gradient.sign()), y)
        return again + loss if batch_idx else again

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            self.log("val_loss", self.training_step(batch, 0), sync_dist=True)


class Bounded(Classifier):
    """Bounds each element behind each backward, of several for an update."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad.clamp_(-0.02, 0.02)


MODULES: dict[str, type[Classifier]] = {
    "bounded": Bounded,
    "passing": Passing,
    "listed": Listed,
    "scaled": Scaled,
    "adversarial": Adversarial,
}


def fit(name: str, devices: int) -> State:
    module = make_module(MODULES[name])
    strategy: Any = "auto"
    if devices > 1:
        strategy = FSDPStrategy(wrap=ByClass(["Routed", "Up", "Noting"]))
        if name != "passing":
            strategy = FSDPStrategy()
    options = {"accumulate_grad_batches": 3} if name == "bounded" else {}
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=2, **options)
    loader = make_loader(NUM_SAMPLES)
    if devices > 1:
        loader = share_of(int(os.environ["RANK"]), NUM_SAMPLES)
    trainer.fit(module, loader, loader)
    return state_of(module)


@pytest.mark.some("passing", "adversarial", "bounded")
@pytest.mark.parametrize("name", MODULES)
def test_equals_one_device(workers: WorkerPool, name: str) -> None:
    (expected,) = workers.run(1, fit, name, 1)
    for state in workers.run(2, fit, name, 2):
        assert_equal(state, expected)


class Average(L.Callback):
    """An average of the weights that a user writes."""

    def __init__(self) -> None:
        self.shadow: State = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.shadow = {n: p.detach().clone() for n, p in pl_module.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}


def save_average(path: str, save_full: bool) -> None:
    module = make_module(Classifier)
    trainer = make_trainer(
        devices=2, strategy=FSDPStrategy(save_full=save_full), callbacks=[Average()]
    )
    loader = make_loader(NUM_SAMPLES)
    trainer.fit(module, loader, loader)
    trainer.save_checkpoint(path)


def test_a_callbacks_shards_are_saved_whole(workers: WorkerPool, tmp_path: Any) -> None:
    path = str(tmp_path / "whole.ckpt")
    workers.run(2, save_average, path, True)
    saved = torch.load(path, weights_only=False)
    (state,) = (s for key, s in saved["callbacks"].items() if key.startswith("Average"))
    for name, value in saved["state_dict"].items():
        assert torch.equal(state["shadow"][name], value), name


class Anew(Classifier):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"], checkpoint["lr_schedulers"] = [], []

    def configure_optimizers(self) -> Any:
        return make_optimizer("adamw", self.parameters())


def begin_anew(path: str) -> int:
    loader = make_loader(NUM_SAMPLES)
    options: dict[str, Any] = {"devices": 2, "max_epochs": 1}
    trainer = make_trainer(**options, strategy=FSDPStrategy())
    trainer.fit(make_module(Anew), loader, loader)
    trainer.save_checkpoint(path)
    trainer = make_trainer(**{**options, "max_epochs": 2}, strategy=FSDPStrategy())
    trainer.fit(make_module(Anew), loader, loader, ckpt_path=path, weights_only=False)
    (optimizer,) = trainer.optimizers
    return int(next(iter(optimizer.state.values()))["step"])


def test_a_hook_may_drop_the_optimizers_of_a_checkpoint(workers: WorkerPool, tmp_path: Any) -> None:
    assert workers.run(2, begin_anew, str(tmp_path / "first")) == [3, 3]  # one epoch's
