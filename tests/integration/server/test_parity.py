"""In step, servers give what DDP gives, whatever the optimizer keeps and wherever."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor

from lightning_dist import DDPStrategy, ParameterServerStrategy
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_trainer,
    share_of,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool
from tests.integration.ddp.local_steps import Teacher

OPTIMIZERS = ("sgd", "adamw", "schedule_free", "adagrad")


class Finetuned(Classifier):
    """Has a backbone that is thawed, into a group of its own, in the second epoch."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.backbone = self.model[:3]

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=0.01)


class Doubling(Classifier):
    """Changes its weights where an epoch begins."""

    def on_train_epoch_start(self) -> None:
        with torch.no_grad():
            self.model[0].conv.weight.mul_(2.0)


class Shrinking(Classifier):
    """Changes its weights behind each step, as a critic whose weights are clipped."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.9)


def fit(strategy: Any, module: Classifier, devices: int, **options: Any) -> dict[str, Tensor]:
    rank = int(os.environ.get("RANK", "0"))
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=2, **options)
    trainer.fit(module, share_of(rank, 48, devices), make_loader(8))
    return state_of(module)


def fit_all(devices: int, kind: str) -> list[dict[str, Tensor]]:
    strategy = {
        "ddp": DDPStrategy,
        "server": lambda: ParameterServerStrategy(num_servers=min(devices, 2), timeout_s=30.0),
        "auto": lambda: "auto",
    }[kind]
    found = []
    for optimizer in OPTIMIZERS:
        module = make_module(Classifier, optimizer=optimizer, schedule_lr=True)
        found.append(fit(strategy(), module, devices, accumulate_grad_batches=2))
    found += [fit(strategy(), make_module(class_), devices) for class_ in (Doubling, Shrinking)]
    thaws = BackboneFinetuning(1, lambda epoch: 1.0, initial_denom_lr=2.0)
    found.append(fit(strategy(), make_module(Finetuned), devices, callbacks=[thaws]))
    return found


def assert_equal(found: list[list[dict[str, Tensor]]], expected: list[dict[str, Tensor]]) -> None:
    for rank in found:
        for own, other in zip(rank, expected, strict=True):
            for name, value in other.items():
                assert float((own[name] - value).abs().max()) < 1e-12, name


@pytest.mark.long
def test_synchronous_servers_equal_ddp(workers: WorkerPool) -> None:
    (expected, *_) = workers.run(3, fit_all, 3, "ddp")
    assert_equal(workers.run(3, fit_all, 3, "server"), expected)


@pytest.mark.long
def test_one_worker_equals_one_device(workers: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = workers.run(1, fit_all, 1, "server")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert_equal(found, fit_all(1, "auto"))


class Follows(Teacher):
    """Is served without its teacher."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.05)


def fit_async() -> dict[str, Tensor]:
    return fit(ParameterServerStrategy("async"), make_module(Follows), 2)


def test_frozen_parameters_that_hooks_write_are_the_first_ranks(workers: WorkerPool) -> None:
    start = state_of(make_module(Follows))
    one, other = workers.run(2, fit_async)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert not any(torch.equal(one[n], start[n]) for n in one if n.startswith("teacher."))
