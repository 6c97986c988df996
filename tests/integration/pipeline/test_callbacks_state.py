"""What callbacks count, keep and save beside stages, and buffers ahead of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torchmetrics import SumMetric

from lightning_dist import MeshStrategy, PipelineStrategy
from lightning_dist.callbacks import ShardedWeightAveraging
from lightning_dist.checkpoint import load_full
from lightning_dist.engine.splitting.config import PipelineConfig
from tests.helpers.networks.models import (
    Classifier,
    assert_equal,
    make_loader,
    make_module,
    make_trainer,
)
from tests.helpers.processes.workers import WorkerPool


def strategy_of(devices: int, schedule: str, **options: Any) -> Any:
    return PipelineStrategy(schedule=schedule, **options) if devices > 1 else "auto"


class CountsSamples(L.Callback):
    """Counts in metrics of its own."""

    def __init__(self) -> None:
        self.seen = SumMetric()
        self.parts = nn.ModuleDict({"inner": SumMetric()})
        self.found: list[float] = []

    def on_validation_batch_end(self, *arguments: Any, **_: Any) -> None:
        batch = arguments[3]
        self.seen.update(len(batch[0]))
        self.parts["inner"].update(len(batch[0]))

    def on_validation_epoch_end(self, *_: Any) -> None:
        self.found = [float(self.seen.compute()), float(self.parts["inner"].compute())]


def count(devices: int) -> list[float]:
    counts = CountsSamples()
    strategy = strategy_of(devices, "1f1b", num_microbatches=2)
    trainer = make_trainer(devices=devices, strategy=strategy, callbacks=[counts])
    trainer.fit(make_module(Classifier), make_loader(16), make_loader(22))
    return counts.found


def test_metrics_of_callbacks_count_each_sample_once(workers: WorkerPool) -> None:
    assert workers.run(2, count, 2) == [[22.0, 22.0]] * 2


class Saves(Classifier):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.global_step == 2:
            self.trainer.save_checkpoint(self.path)


def save_in_an_update(path: str, schedule: str) -> str:
    torch.manual_seed(7)
    module = Saves(path).double()
    try:
        trainer = make_trainer(devices=2, strategy=PipelineStrategy(schedule=schedule))
        trainer.fit(module, make_loader(), make_loader())
    except ValueError as error:
        return str(error)
    return "saved"


@pytest.mark.some("pipedream")
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_no_checkpoint_has_stages_of_several_updates(
    workers: WorkerPool, tmp_path: Path, schedule: str
) -> None:
    for found in workers.run(2, save_in_an_update, str(tmp_path / "saved"), schedule):
        if schedule == "pipedream":
            assert "in hooks of a validation" in found
        else:
            assert found == "saved"


def save_weights(path: str, devices: int) -> None:
    callbacks = [
        ShardedWeightAveraging(decay=0.5),
        ModelCheckpoint(path, save_weights_only=True, filename="weights", every_n_train_steps=6),
        ModelCheckpoint(path, filename="all"),
    ]
    strategy = strategy_of(devices, "1f1b", num_microbatches=2, save_full=True)
    trainer = make_trainer(
        devices=devices, strategy=strategy, callbacks=callbacks, enable_checkpointing=True
    )
    trainer.fit(make_module(Classifier), make_loader(), make_loader())


@pytest.mark.parametrize("devices", [1, 2])
def test_weights_alone_are_averages_too(workers: WorkerPool, tmp_path: Path, devices: int) -> None:
    workers.run(devices, save_weights, str(tmp_path), devices)
    weights = torch.load(tmp_path / "weights.ckpt", weights_only=False)["state_dict"]
    whole = torch.load(tmp_path / "all.ckpt", weights_only=False)
    assert weights.keys() == whole["state_dict"].keys()
    differs = False
    for name, value in whole["state_dict"].items():
        assert torch.equal(weights[name], value), name
        differs |= not torch.equal(whole["current_model_state"][name], value)
    assert differs


class Ahead(Classifier):
    """Normalises by a frozen norm ahead of the model, whose statistics go on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(self.norm(x)), y)


def statistics(devices: int) -> dict[str, Tensor]:
    module = make_module(Ahead)
    strategy = strategy_of(devices, "zbv")
    trainer = make_trainer(devices=devices, strategy=strategy)
    trainer.fit(module, make_loader(), make_loader())
    return {name: buffer.clone() for name, buffer in module.norm.named_buffers()}


def test_statistics_ahead_of_the_model_see_a_batch_once(workers: WorkerPool) -> None:
    (expected,) = workers.run(1, statistics, 1)
    for found in workers.run(2, statistics, 2):
        assert_equal(found, expected)


class Renames(Classifier):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.model.state_dict(*args, **kwargs)


class Drops(Classifier):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if "bias" not in name}


def fit_with_own_names(class_: type[Classifier], mesh: bool) -> str:
    config = PipelineConfig(num_microbatches=2)
    strategy: Any = PipelineStrategy(num_microbatches=2)
    if mesh:
        strategy = MeshStrategy(pp=2, dp_shard=2, pipeline=config)
    trainer = make_trainer(devices=4 if mesh else 2, strategy=strategy)
    try:
        trainer.fit(make_module(class_), make_loader(), make_loader())
    except ValueError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("mesh", [False, True])
def test_layers_under_other_names_are_refused(workers: WorkerPool, mesh: bool) -> None:
    number = 4 if mesh else 2
    (found,) = set(workers.run(number, fit_with_own_names, Renames, mesh))
    assert found.startswith("`state_dict` of Renames gives layers other names")
    assert set(workers.run(number, fit_with_own_names, Drops, mesh)) == {"trained"}


class Leaves(Ahead):
    """Leaves some weights out of its checkpoints, and writes one more."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["norm.running_var"]
        checkpoint["state_dict"]["norm.running_mean"] += 1
        checkpoint["state_dict"]["written"] = torch.ones(2)


def save_less(path: str, save_full: bool) -> None:
    strategy = PipelineStrategy(num_microbatches=1, save_full=save_full)
    trainer = make_trainer(devices=2, strategy=strategy)
    trainer.fit(make_module(Leaves), make_loader(), make_loader())
    trainer.save_checkpoint(path)


@pytest.mark.some("True")
@pytest.mark.parametrize("save_full", [False, True])
def test_hooks_change_what_is_saved_beside_the_layers(
    workers: WorkerPool, tmp_path: Path, save_full: bool
) -> None:
    path = str(tmp_path / "less.ckpt")
    workers.run(2, save_less, path, save_full)
    (expected,) = workers.run(1, statistics, 1)
    saved = load_full(path)
    found = saved.get("state_dict", saved)
    assert "norm.running_var" not in found
    assert torch.equal(found["written"], torch.ones(2))
    assert float((found["norm.running_mean"] - expected["running_mean"] - 1).abs().max()) < 1e-12
