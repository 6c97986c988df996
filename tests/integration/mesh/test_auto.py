"""A mesh that is chosen when training begins: it trains as a single device, and says what it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_dist import AutoStrategy
from lightning_dist.callbacks import MixedPrecision
from lightning_dist.checkpoint import load_full
from lightning_dist.engine.planning.search.plan import Plan
from tests.helpers.gpt_parity import BATCH_SIZE, DEPTH, TOLERANCE, Measured, data, make_gpt
from tests.helpers.networks.models import make_trainer
from tests.helpers.processes.workers import WorkerPool


class Stream(IterableDataset[Any]):
    """Can be read once only."""

    def __init__(self) -> None:
        self.samples = iter(data(16))

    def __iter__(self) -> Any:
        assert os.environ.get("RANK", "0") == "0", "the first rank reads for the others"
        return self.samples


def train(strategy: Any, devices: int, path: Path) -> Any:
    module = make_gpt()
    trainer = make_trainer(devices=devices, strategy=strategy)
    loaders = (DataLoader(it, batch_size=BATCH_SIZE) for it in (Stream(), data(BATCH_SIZE)))
    trainer.fit(module, *loaders)
    trainer.save_checkpoint(path)
    return trainer.global_step


class Watched(AutoStrategy):
    """Checks that measuring draws no random numbers of the run's."""

    def check_run(self, trainer: L.Trainer) -> None:
        before = torch.get_rng_state()
        super().check_run(trainer)
        assert torch.equal(torch.get_rng_state(), before)


def train_planned(path: Path, replicas: int | None) -> Any:
    strategy = Watched(replicas=replicas, timeout_s=60.0)
    num_steps = train(strategy, 2, path)
    assert strategy.ranking is not None
    return num_steps, strategy.ranking.best


class Asking(Measured):
    """Looks at the learning rate in each step, as to log it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scheduler: Any = self.lr_schedulers()
        assert scheduler.get_last_lr() == [self.optimizers().param_groups[0]["lr"]] == [0.01]
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def fit_twice() -> str:
    """Validates, fits, and fits by another strategy."""
    module = Asking(width=32, depth=DEPTH, num_heads=4)
    batches = DataLoader(data(BATCH_SIZE), batch_size=BATCH_SIZE)
    strategy = AutoStrategy(replicas=1, timeout_s=60.0)
    trainer = make_trainer(devices=2, strategy=strategy, max_steps=1)
    trainer.validate(module, batches)
    trainer.fit(module, batches, batches)
    assert trainer.global_step == 1
    again = make_trainer(devices=2, strategy=AutoStrategy(timeout_s=60.0), max_steps=2)
    with pytest.raises(ValueError, match="measures a whole module") as error:
        again.fit(module, batches, batches)
    return str(error.value)


def test_fits_what_it_has_validated_by_steps_that_ask_for_the_rate(workers: WorkerPool) -> None:
    first, second = workers.run(2, fit_twice, timeout=120.0)
    assert first == second


def fit_by_hand() -> None:
    module = make_gpt()
    module.automatic_optimization = False
    batches = DataLoader(data(BATCH_SIZE), batch_size=BATCH_SIZE)
    with pytest.raises(ValueError, match="optimizes manually"):
        make_trainer(devices=2, strategy=AutoStrategy(timeout_s=60.0)).fit(module, batches, batches)


def test_refuses_manual_optimization(workers: WorkerPool) -> None:
    workers.run(2, fit_by_hand, timeout=120.0)


def test_trains_on_the_best_plan_as_a_single_device(
    workers: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (num_steps, plan), other = workers.run(2, train_planned, tmp_path / "two", 1, timeout=120.0)
    assert other == (num_steps, plan)
    assert plan.layout.mesh.data_size == 1  # so it has two stages, or two tensor-parallel ranks
    assert plan.layout.batch_size == BATCH_SIZE
    assert train("auto", 1, tmp_path / "one") == num_steps == 4
    planned, single = (load_full(tmp_path / name) for name in ("two", "one"))
    assert Plan.from_dict(planned["lightning_dist_plan"]) == plan
    assert planned["state_dict"].keys() == single["state_dict"].keys()
    for name, value in single["state_dict"].items():
        torch.testing.assert_close(planned["state_dict"][name], value, rtol=0, atol=TOLERANCE)


def rehearse_in_half() -> tuple[int, int]:
    strategy = AutoStrategy(num_plans=1000, timeout_s=60.0)
    half = MixedPrecision("fp16")
    trainer = make_trainer(
        devices=2, strategy=strategy, precision="32-true", callbacks=[half], limit_train_batches=2
    )
    loaders = (DataLoader(data(number), batch_size=BATCH_SIZE) for number in (16, BATCH_SIZE))
    trainer.fit(make_gpt().float(), *loaders)
    assert strategy.ranking is not None
    assert half.loss_scale is not None
    return len({layout.mesh for layout in strategy.ranking.tried}), half.loss_scale.num_steps


@pytest.mark.long
def test_tries_steps_in_half_precision_without_its_loss_scale(workers: WorkerPool) -> None:
    for found in workers.run(2, rehearse_in_half, timeout=120.0):
        assert found == (4, 2)  # replicas, stages, shards, tensor-parallel ranks; the fit's steps


def fail_to_fit(path: Path) -> str:
    strategy = AutoStrategy(memory_gib=1e-6, timeout_s=60.0)
    with pytest.raises(ValueError, match="It would fit with") as error:
        train(strategy, 2, path)
    return str(error.value)


def test_what_does_not_fit_is_said_on_all_ranks(workers: WorkerPool, tmp_path: Path) -> None:
    first, second = workers.run(2, fail_to_fit, tmp_path / "none", timeout=120.0)
    assert first == second
