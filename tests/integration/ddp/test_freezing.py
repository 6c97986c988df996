"""Parameters that are frozen and unfrozen while a fit runs are trained as on a single device."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_dist import DDPStrategy
from lightning_dist.engine.comms.failures.peer_failure import RankFailedError
from tests.helpers.networks.models import (
    Classifier,
    make_data,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import CaseFailedError, WorkerPool

NUM_SAMPLES = 48


class Changing(Classifier):
    """Freezes and unfreezes parts: at the start of an epoch, or within it."""

    def __init__(self, plan: dict[tuple[int, int], tuple[int, bool]], optimizer: str) -> None:
        super().__init__(optimizer)
        self.plan = plan
        self.model[2].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if (self.current_epoch, batch_idx) in self.plan:
            layer, flag = self.plan[self.current_epoch, batch_idx]
            self.model[layer].requires_grad_(flag)


class OnOneRank(Changing):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if os.environ["RANK"] == "1":
            super().on_train_batch_start(batch, batch_idx)


class InStep(Changing):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None: ...

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        super().on_train_batch_start(batch, batch_idx)
        return super().training_step(batch, batch_idx)


class Thawing(BaseFinetuning):
    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module.model[:3])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model[:3], optimizer, lr=0.01)


class TrainableOnly(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02)


UNFREEZE = {(1, 0): (2, True)}
FREEZE = {(1, 0): (1, False), (2, 1): (1, True)}
MIDDLE = {(0, 1): (2, True), (1, 1): (1, False), (1, 3): (1, True), (2, 3): (0, False)}


def loader(world_size: int, num_samples: int = NUM_SAMPLES) -> DataLoader:
    data = make_data(num_samples)
    if world_size == 1:
        return DataLoader(data, batch_size=8)
    rank = int(os.environ["RANK"])
    return DataLoader(data, 4, sampler=DistributedSampler(data, 2, rank, shuffle=False))


def fit(
    module: type[Classifier], arguments: Any, options: dict[str, Any] | None, **kwargs: Any
) -> dict[str, Tensor]:
    built = make_module(module, **arguments)
    if module is TrainableOnly:
        kwargs["callbacks"] = [Thawing()]
    world_size = 1 if options is None else 2
    strategy = "auto" if options is None else DDPStrategy(**options)
    trainer = make_trainer(
        devices=world_size, strategy=strategy, max_epochs=3, num_sanity_val_steps=0, **kwargs
    )
    trainer.fit(built, loader(world_size), make_loader(8))
    return state_of(built)


def fit_accumulating(*arguments: Any) -> dict[str, Tensor]:
    return fit(*arguments, accumulate_grad_batches=3)


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.some("plan2-options2-sgd")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (UNFREEZE, {}),
        (FREEZE, {}),
        (FREEZE, {"static_graph": True}),
        (UNFREEZE, {"uneven_inputs": True}),
        (UNFREEZE, {"overlap": False}),
        (FREEZE, {"find_unused_parameters": True}),
    ],
)
def test_replicas_equal_a_single_device(
    workers: WorkerPool, plan: Any, options: dict[str, Any], optimizer: str
) -> None:
    arguments = {"plan": plan, "optimizer": optimizer}
    single = fit(Changing, arguments, None)
    for state in workers.run(2, fit, Changing, arguments, options):
        assert difference(single, state) < 1e-10


@pytest.mark.some("options1")
@pytest.mark.parametrize("options", [{}, {"static_graph": True}])
def test_changes_between_the_micro_steps_of_an_update(
    workers: WorkerPool, options: dict[str, Any]
) -> None:
    arguments = {"plan": MIDDLE, "optimizer": "adamw"}
    single = fit_accumulating(Changing, arguments, None)
    for state in workers.run(2, fit_accumulating, Changing, arguments, options):
        assert difference(single, state) < 1e-10


def test_lightnings_finetuning(workers: WorkerPool) -> None:
    single = fit(TrainableOnly, {}, None)
    for state in workers.run(2, fit, TrainableOnly, {}, {}):
        assert difference(single, state) < 1e-10


@pytest.mark.some("options[12]")
@pytest.mark.parametrize(
    "options",
    [{"sync_every": 4}, {"sync_every": 2, "sync_warmup_steps": 9}, {"compression": "powersgd"}],
)
def test_replicas_stay_equal_where_a_single_device_is_not(
    workers: WorkerPool, options: dict[str, Any]
) -> None:
    arguments = {"plan": {(1, 0): (1, False), (1, 2): (2, True)}, "optimizer": "sgd"}
    first, second = workers.run(2, fit, Changing, arguments, options)
    assert difference(first, second) == 0.0


def refusal(*arguments: Any) -> str:
    with pytest.raises((ValueError, RankFailedError)) as caught:
        fit(*arguments)
    return str(caught.value)


def keep_refusal(folder: str, *arguments: Any) -> None:
    Path(folder, os.environ["RANK"]).write_text(refusal(*arguments))


@pytest.mark.some("plan1-*")
@pytest.mark.parametrize(
    ("plan", "options"), [(UNFREEZE, {}), ({(1, 0): (1, False)}, {"sync_every": 2})]
)
def test_a_change_on_one_rank_is_refused(
    workers: WorkerPool, plan: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    arguments = {"plan": plan, "optimizer": "sgd"}
    # The other rank may be in an all-reduce of torch's, which only the end of its process ends.
    with suppress(CaseFailedError):
        workers.run(2, keep_refusal, str(tmp_path), OnOneRank, arguments, options)
    texts = [path.read_text() for path in tmp_path.iterdir()]
    assert any("rank 1) has frozen or unfrozen ['model." in text for text in texts), texts


def test_a_change_inside_of_a_step_is_refused(workers: WorkerPool) -> None:
    texts = workers.run(2, refusal, InStep, {"plan": UNFREEZE, "optimizer": "sgd"}, {})
    assert any(re.search("has frozen or unfrozen .*'model.* while it ran", t) for t in texts), texts
