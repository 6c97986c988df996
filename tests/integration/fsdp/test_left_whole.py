"""Parameters without a dimension or elements are whole on each rank, and train as on one device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dist import DDPStrategy, FSDPStrategy, MeshStrategy
from lightning_dist.callbacks import MixedPrecision
from lightning_dist.checkpoint import load_full
from tests.helpers.networks.models import (
    Classifier,
    ConvLayer,
    make_loader,
    make_module,
    make_trainer,
    share_of,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool


class Scaled(ConvLayer):
    """Has a trained number, a frozen one, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.frozen = nn.Parameter(torch.tensor(0.9), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale * self.frozen + self.nothing.sum()


class WithScalars(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(Scaled(), Scaled(), nn.Flatten(), nn.Linear(12, 3))
        self.temperature = nn.Parameter(torch.tensor(1.5), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]) / self.temperature, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Thaws(L.Callback):
    """Trains the frozen number of the step from the second batch on."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        module.temperature.requires_grad_()


class BuiltLate(WithScalars):
    """Makes another number when the model is configured."""

    def configure_model(self) -> None:
        if not hasattr(self, "late"):
            self.late = nn.Parameter(torch.tensor(1.1, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.late * super().training_step(batch, batch_idx)


class Sometimes(WithScalars):
    """Uses a number in every other step, and another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.bonus, self.unused = (nn.Parameter(torch.tensor(0.3)) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx % 2 else loss * self.bonus


class Manual(WithScalars):
    """Calls backward twice for each update."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for part in (0, 1):
            share = [tensor[part::2] for tensor in batch]
            self.manual_backward(super().training_step(share, batch_idx))
        optimizer.step()


ACCUMULATING = {"accumulate_grad_batches": 2}

# Ranks, data replicas among them, and the strategy.
STRATEGIES: dict[str, tuple[int, int, Any]] = {
    "shards": (2, 2, FSDPStrategy),
    "gradients": (2, 2, lambda: FSDPStrategy(shard="gradients")),
    "any": (2, 2, lambda: FSDPStrategy(find_unused_parameters=True)),
    "hybrid": (4, 4, lambda: MeshStrategy(dp_replicate=2, dp_shard=2)),
    "stages": (4, 2, lambda: MeshStrategy(pp=2, dp_shard=2)),
}


def fit(
    name: str, is_alone: bool, folder: str, kind: type[WithScalars], options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Trains for an epoch, saves, and goes on in a new module; returns both states."""
    devices, replicas, make = STRATEGIES[name]
    strategy = "auto" if is_alone else make()
    options = dict(options)
    if name != "stages":  # which refuse what they train outside of layers
        options["callbacks"] = [Thaws()]
    if kind is not Manual:
        options["gradient_clip_val"] = 0.5
    trainer = make_trainer(devices=1 if is_alone else devices, strategy=strategy, **options)

    index = int(os.environ["RANK"]) % replicas

    def go_on(path: str | None) -> None:
        counts = (24 * replicas, 4 * replicas)
        if is_alone:
            loaders = (make_loader(count, 4 * replicas) for count in counts)
        else:
            loaders = (share_of(index, count, replicas) for count in counts)
        trainer.fit(make_module(kind), *loaders, ckpt_path=path)

    go_on(None)
    path = f"{folder}/{is_alone}.ckpt"
    trainer.save_checkpoint(path)
    trainer.strategy.barrier()
    saved = torch.load(path) if is_alone else load_full(path)
    trainer.fit_loop.max_epochs = 2
    go_on(path)
    return saved["state_dict"], state_of(trainer.lightning_module)


@pytest.mark.some("any-sometimes")
@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        pytest.param("shards", WithScalars, {}, id="shards-plain"),
        pytest.param("shards", BuiltLate, {}, id="shards-late"),
        pytest.param("shards", Manual, {}, id="shards-manual"),
        pytest.param("gradients", WithScalars, {}, id="gradients-plain"),
        pytest.param("any", Sometimes, {}, id="any-sometimes"),
        pytest.param("hybrid", WithScalars, {}, id="hybrid-plain"),
        pytest.param("hybrid", WithScalars, ACCUMULATING, id="hybrid-accumulating"),
        pytest.param("stages", WithScalars, {}, id="stages-plain"),
        pytest.param("stages", WithScalars, ACCUMULATING, id="stages-accumulating"),
    ],
)
def test_they_train_as_on_one_device(
    workers: WorkerPool,
    tmp_path: Path,
    name: str,
    kind: type[WithScalars],
    options: dict[str, Any],
) -> None:
    ((expected, trained_on),) = workers.run(1, fit, name, True, str(tmp_path), kind, options)
    num_ranks = STRATEGIES[name][0]
    for found, again in workers.run(num_ranks, fit, name, False, str(tmp_path), kind, options):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-8, atol=1e-10, msg=key)
        for key, value in again.items():
            torch.testing.assert_close(value, trained_on[key], rtol=1e-8, atol=1e-10, msg=key)


class InHalf(WithScalars):
    """Trains a number in its steps, which stays in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature.requires_grad_()
        self.seen: set[torch.dtype] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.add(self.temperature.dtype)
        return super().training_step(batch, batch_idx)


def fit_in_half() -> list[dict[str, Tensor]]:
    states = []
    for make in (FSDPStrategy, DDPStrategy):
        module = make_module(InHalf).float()
        options: Any = {"devices": 2, "strategy": make(), "callbacks": [MixedPrecision("bf16")]}
        trainer = make_trainer(**options)
        rank = trainer.strategy.distributed_sampler_kwargs["rank"]
        batches: Any = [(x.float(), y) for x, y in share_of(rank, 46)]
        loader = DataLoader(batches, batch_size=None)
        trainer.fit(module, loader, loader)
        assert module.seen == {torch.float32}
        states.append(state_of(module))
    return states


def test_a_number_of_the_steps_stays_in_single_precision(workers: WorkerPool) -> None:
    for sharded, replicated in workers.run(2, fit_in_half):
        assert sharded["temperature"] != 1.5
        assert all(torch.equal(sharded[name], value) for name, value in replicated.items())
