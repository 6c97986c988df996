"""Replicas draw other random numbers than each other, and a resumed run those of the whole one."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_dist import DDPStrategy, MeshStrategy
from tests.helpers.networks.models import (
    Classifier,
    make_data,
    make_loader,
    make_module,
    make_trainer,
    share_of,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool

NUM_SAMPLES = 24


class Augmented(Dataset[Any]):
    """Each sample with its number and something from each generator."""

    def __init__(self) -> None:
        self.data = make_data(NUM_SAMPLES)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        noise = torch.tensor([random.random(), np.random.random(), torch.rand(()).item()])
        return index, noise, x + noise.double().sum(), y


class Drawing(Classifier):
    """Keeps what it was given and what it draws itself."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.indices: list[list[int]] = []
        self.noise: list[Tensor] = []
        self.drawn: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        index, noise, *rest = batch
        self.indices.append(index.tolist())
        self.noise.append(noise)
        self.drawn.append(torch.nn.functional.dropout(torch.ones(40)))
        return super().training_step(rest, batch_idx)


def fit(workers: int, epochs: int, resume: str | None, save: str | None) -> Any:
    module = make_module(Drawing)
    L.seed_everything(1, verbose=False)
    trainer = make_trainer(
        devices=2,
        strategy=DDPStrategy(save_full=True),
        max_epochs=epochs,
        use_distributed_sampler=True,
        num_sanity_val_steps=0,
    )
    # The processes that the tests run in were spawned, and would spawn in their turn.
    start = {"multiprocessing_context": "fork"} if workers else {}
    loader = DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=workers, **start)
    with warnings.catch_warnings():
        # Workers that live on are not seeded anew for the next epoch.
        warnings.filterwarnings("ignore", message=".*persistent_workers=True.*")
        trainer.fit(module, loader, make_loader(8), ckpt_path=resume, weights_only=True)
    if save is not None:
        trainer.save_checkpoint(save)
    state = {name: p.detach().clone() for name, p in module.named_parameters()}
    return state, module.indices, torch.stack(module.noise), torch.stack(module.drawn)


@pytest.mark.some("1")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_they_differ_between_replicas_and_are_the_same_when_resumed(
    workers: WorkerPool, num_workers: int, tmp_path: Path
) -> None:
    whole = workers.run(2, fit, num_workers, 2, None, None)
    path = str(tmp_path / "middle.ckpt")
    workers.run(2, fit, num_workers, 1, None, path)
    resumed = workers.run(2, fit, num_workers, 2, path, None)

    (_, first, noise, drawn), (_, second, other_noise, other_drawn) = whole
    for batches in (slice(0, 3), slice(3, 6)):  # each epoch is shared out without rest
        seen = [i for batch in first[batches] + second[batches] for i in batch]
        assert sorted(seen) == list(range(NUM_SAMPLES))
    assert not torch.isclose(noise, other_noise).any()
    together = torch.cat([drawn, other_drawn])
    assert len({tuple(mask.tolist()) for mask in together}) == len(together)
    every_noise = torch.cat([noise, other_noise]).flatten()
    assert len(every_noise.unique()) == len(every_noise)

    for (state, indices, noise, drawn), (again, *rest) in zip(whole, resumed, strict=True):
        assert all(torch.equal(state[name], again[name]) for name in state)
        assert rest[0] == indices[3:]
        assert torch.equal(rest[1], noise[3:])
        assert torch.equal(rest[2], drawn[3:])


class Noisy(Classifier):
    """Adds noise to its gradients, and to its weights behind the update."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(0.1 * torch.randn_like(parameter.grad))

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        next(self.parameters()).add_(0.01 * random.random())


def fit_noisily(kind: str) -> dict[str, Tensor]:
    strategies: dict[str, Any] = {
        "ddp": DDPStrategy,
        "mesh": lambda: MeshStrategy(pp=2, dp_replicate=2),
    }
    devices = {"ddp": 2, "mesh": 4}[kind]
    trainer = make_trainer(devices=devices, strategy=strategies[kind]())
    module = make_module(Noisy)
    place = trainer.strategy.distributed_sampler_kwargs["rank"]
    trainer.fit(module, share_of(place, 32), make_loader(8))
    return state_of(module)


@pytest.mark.parametrize(("kind", "pairs"), [("ddp", [(0, 1)]), ("mesh", [(0, 1), (2, 3)])])
def test_replicas_stay_equal_with_noise_in_hooks(
    workers: WorkerPool, kind: str, pairs: list[tuple[int, int]]
) -> None:
    ranks = workers.run(2 if kind == "ddp" else 4, fit_noisily, kind)
    for first, second in pairs:
        one, other = ranks[first], ranks[second]
        assert one.keys() == other.keys()
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-12)
