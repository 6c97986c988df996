"""BatchNorm over replicas equals BatchNorm over the global batch on one device, backward too."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import DDPStrategy
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_optimizer,
    make_trainer,
    share_of,
)
from tests.helpers.processes.workers import WorkerPool

# Rows of each rank in each batch: uneven in the last one, where a rank has a single row.
ROWS = ((3, 3), (2, 4), (5, 1))


class Normed(L.LightningModule):
    """A weighted sum over the batch, so that ranks with other numbers of rows count rightly."""

    def __init__(self, momentum: float | None, affine: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"momentum": momentum, "affine": affine}
        self.model = nn.Sequential(
            nn.Conv1d(2, 4, 3),
            nn.BatchNorm1d(4, **options),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(16, 3),
            nn.BatchNorm1d(3, track_running_stats=momentum is not None, **options),
        )

    def loss(self, batch: Any, num_ranks: int) -> Tensor:
        x, y = batch
        return (self.model(x).tanh() * y).sum() / 6 * num_ranks

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch, self.trainer.world_size)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch, 1))

    def configure_optimizers(self) -> Any:
        return make_optimizer("sgd", self.parameters())


def batches(rank: int | None) -> list[list[Tensor]]:
    """The global batches, or one rank's rows of each."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for rows in ROWS:
        x = torch.randn(6, 2, 6, generator=generator, dtype=torch.float64)
        y = torch.randn(6, 3, generator=generator, dtype=torch.float64)
        places = slice(None) if rank is None else slice(sum(rows[:rank]), sum(rows[: rank + 1]))
        found.append([x[places], y[places]])
    return found


def fit(devices: int, momentum: float | None, affine: bool, sync: bool = True) -> Any:
    module = make_module(Normed, momentum=momentum, affine=affine)
    kinds = [type(m) for m in module.modules()]
    trainer = make_trainer(
        devices=devices,
        strategy=DDPStrategy() if devices > 1 else "auto",
        sync_batchnorm=sync and devices > 1,
        max_epochs=2,
    )
    own = batches(int(os.environ["RANK"]) if devices > 1 else None)
    validation = DataLoader(TensorDataset(*batches(None)[0]), batch_size=6)
    trainer.fit(module, DataLoader(own, batch_size=None), validation)
    assert [type(m) for m in module.modules()] == kinds
    assert not any("forward" in vars(m) for m in module.modules())
    return module.state_dict(), float(trainer.callback_metrics["val"])


@pytest.mark.parametrize(("momentum", "affine"), [(0.1, True), (None, False)])
def test_equals_a_single_device(
    workers: WorkerPool, momentum: float | None, affine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    state, value = fit(1, momentum, affine)
    for found, found_value in workers.run(2, fit, 2, momentum, affine):
        assert found.keys() == state.keys()
        for name, expected in state.items():
            assert float((found[name] - expected).abs().max()) < 1e-12, name
        assert found_value == pytest.approx(value, abs=1e-12)


def fit_without_tracking(devices: int) -> dict[str, Tensor]:
    module = make_module(Normed, momentum=0.1, affine=True)
    module.model[1].track_running_stats = False  # as `BaseFinetuning.freeze` does
    trainer = make_trainer(
        devices=devices,
        strategy=DDPStrategy() if devices > 1 else "auto",
        sync_batchnorm=devices > 1,
        limit_val_batches=0,
    )
    own = batches(int(os.environ["RANK"]) if devices > 1 else None)
    trainer.fit(module, DataLoader(own, batch_size=None), make_loader(8))
    return module.state_dict()


def test_what_is_not_to_be_tracked_stays(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    state = fit_without_tracking(1)
    assert state["model.1.num_batches_tracked"] == 0
    for found in workers.run(2, fit_without_tracking, 2):
        for name, expected in state.items():
            assert float((found[name] - expected).abs().max()) < 1e-12, name


class ComparesStatistics(Classifier):
    """Keeps the running statistics that its validation sees."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.BatchNorm1d(2), self.model)
        self.seen: list[Tensor] = []

    def on_validation_epoch_start(self) -> None:
        self.seen.append(self.model[0].running_mean.clone())


def statistics_at_validation() -> list[Tensor]:
    module = make_module(ComparesStatistics)
    trainer = make_trainer(devices=2, strategy=DDPStrategy(), num_sanity_val_steps=0)
    trainer.fit(module, share_of(int(os.environ["RANK"]), 32), make_loader(8))
    return module.seen


def test_without_it_all_ranks_validate_with_the_first_ones_statistics(
    workers: WorkerPool,
) -> None:
    first, second = workers.run(2, statistics_at_validation)
    assert len(first) == 1
    assert first[0].abs().max() > 0
    assert torch.equal(first[0], second[0])


def refuse() -> None:
    module = make_module(Normed, momentum=0.1, affine=True)
    strategy = DDPStrategy(uneven_inputs=True)
    trainer = make_trainer(devices=2, strategy=strategy, sync_batchnorm=True)
    loader = DataLoader(batches(int(os.environ["RANK"])), batch_size=None)
    with pytest.raises(ValueError, match="synchronised BatchNorm"):
        trainer.fit(module, loader, loader)
    assert not any("forward" in vars(m) for m in module.modules())


def test_layers_are_their_own_again_when_a_run_is_refused(workers: WorkerPool) -> None:
    workers.run(2, refuse)
