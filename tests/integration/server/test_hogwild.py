"""Hogwild on a sparse convex problem, whose solution is known."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import HogwildStrategy
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool

NUM_WEIGHTS, TOUCHED, WORKERS = 30, 2, 2


def solution() -> Tensor:
    return torch.linspace(-1.0, 1.0, NUM_WEIGHTS, dtype=torch.float64)


class SparseRegression(L.LightningModule):
    """Least squares; a sample touches two weights, and its gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Embedding(NUM_WEIGHTS, 1, sparse=True)
        nn.init.zeros_(self.weights.weight)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        touched, expected = batch
        return (self.weights(touched).sum((-1, -2)) - expected).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def samples_of(rank: int) -> TensorDataset:
    """Samples in which a rank's own third of the weights occurs, and a third that all have."""
    generator = torch.Generator().manual_seed(rank)
    third = NUM_WEIGHTS // 3
    known = torch.cat([torch.arange(rank * third, (rank + 1) * third), torch.arange(20, 30)])
    picks = torch.randint(0, len(known), (200, TOUCHED), generator=generator)
    touched = known[picks]
    return TensorDataset(touched, solution()[touched].sum(-1))


def solve() -> Tensor:
    module = SparseRegression().double()
    trainer = make_trainer(devices=WORKERS, strategy=HogwildStrategy(timeout_s=30.0), max_epochs=4)
    trainer.fit(module, DataLoader(samples_of(int(os.environ["RANK"])), batch_size=1))
    return module.weights.weight.detach().flatten().clone()


def test_finds_the_solution_of_a_sparse_problem(workers: WorkerPool) -> None:
    first, second = workers.run(WORKERS, solve)
    assert torch.equal(first, second)
    # A rank alone never moves the other one's third, where the solution is up to 1 from 0.
    assert float((first - solution()).abs().max()) < 0.05


class Doubling(Classifier):
    """Changes its weights where an epoch begins, on each rank."""

    def on_train_epoch_start(self) -> None:
        with torch.no_grad():
            self.model[0].conv.weight.mul_(2.0)


def fit(strategy: Any) -> dict[str, Tensor]:
    module = make_module(Doubling, optimizer="adamw", schedule_lr=True)
    trainer = make_trainer(devices=1, strategy=strategy, max_epochs=2)
    trainer.fit(module, make_loader(), make_loader(8))
    return state_of(module)


def fit_both() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return fit(HogwildStrategy()), fit("auto")


@pytest.mark.long
def test_one_worker_is_one_device_to_the_last_bit(workers: WorkerPool) -> None:
    ((found, expected),) = workers.run(1, fit_both)  # another process may round otherwise
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class Still(Doubling):
    """Does not move by itself."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit_still() -> tuple[dict[str, Tensor], bool]:
    module = make_module(Still)
    trainer = make_trainer(devices=WORKERS, strategy=HogwildStrategy(), max_epochs=2)
    before = module.model[0].conv.weight.detach().clone()
    trainer.fit(module, make_loader(16), make_loader(8))
    return state_of(module), torch.equal(module.model[0].conv.weight, 4.0 * before)


@pytest.mark.long
def test_what_hooks_of_all_ranks_change_changes_once(workers: WorkerPool) -> None:
    assert [is_right for _, is_right in workers.run(WORKERS, fit_still)] == [True] * WORKERS


def fit_synchronised() -> None:
    trainer = make_trainer(devices=2, strategy=HogwildStrategy(), sync_batchnorm=True)
    with pytest.raises(ValueError, match="Synchronised BatchNorm waits in its forward"):
        trainer.fit(make_module(Still), make_loader(16), make_loader(8))


def test_statistics_of_all_ranks_are_refused(workers: WorkerPool) -> None:
    workers.run(2, fit_synchronised)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="max_lead=0 must be an integer of at least 1"):
        HogwildStrategy(max_lead=0)


def test_several_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_nodes=2: HogwildStrategy needs all ranks on one"):
        make_trainer(devices=1, num_nodes=2, strategy=HogwildStrategy())
