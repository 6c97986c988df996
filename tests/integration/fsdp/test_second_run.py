"""A second run goes on with what the module holds, wherever that lies by then."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_dist import DDPStrategy, FSDPStrategy, MeshStrategy, PipelineStrategy
from lightning_dist.engine.comms.failures.peer_failure import RankFailedError
from lightning_dist.wrap import ByClass
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import Synced, joined, loaders_of, trainer_of
from tests.integration.conformance.strategies import ENTRIES


def fit_twice(name: str, moves: bool) -> dict[str, Tensor]:
    trainer, entry = trainer_of(name)
    module = make_module(Synced, optimizer="adamw")
    loaders = loaders_of(trainer, entry)
    trainer.fit(module, *loaders)
    if moves:
        module._apply(torch.clone)  # as from a GPU to the host, where Lightning leaves a module
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, *loaders)
    return state_of(module)


@pytest.mark.some("fsdp-2")
@pytest.mark.parametrize("name", ["fsdp-2", "pp-2-shard-2"])
def test_trains_on_parameters_that_lie_elsewhere(workers: WorkerPool, name: str) -> None:
    devices = ENTRIES[name].devices
    expected, found = (joined(workers.run(devices, fit_twice, name, m)) for m in (False, True))
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def fit_by_two_trainers(
    first: Callable[[], Strategy], second: Callable[[], Strategy], **options: Any
) -> str:
    module = make_module(Synced)
    for make, given in ((first, {}), (second, options)):
        trainer = make_trainer(devices=2, strategy=make(), **given)
        try:
            trainer.fit(module, *loaders_of(trainer, ENTRIES["fsdp-2"]))
        except ValueError as error:
            return str(error)
    return ""


def test_another_layout_is_refused(workers: WorkerPool) -> None:
    first = partial(FSDPStrategy, reshard_after_forward=False)
    second = partial(FSDPStrategy, wrap=ByClass(["Linear"]))
    found = workers.run(2, fit_by_two_trainers, first, second)
    expected = (
        "by an earlier Trainer with wrap='auto', reshard_after_forward=False, and this one has"
        " wrap=ByClass(names=['Linear']), reshard_after_forward='auto'."
    )
    assert all(expected in message for message in found), found


def test_another_precision_is_refused(workers: WorkerPool) -> None:
    run = partial(fit_by_two_trainers, precision="bf16-mixed", sync_batchnorm=True)
    found = workers.run(2, run, FSDPStrategy, FSDPStrategy)
    assert all("with precision='32-true', sync_batchnorm=False," in text for text in found), found


def test_the_same_layout_of_another_strategy_goes_on(workers: WorkerPool) -> None:
    assert workers.run(2, fit_by_two_trainers, FSDPStrategy, MeshStrategy) == ["", ""]


def go_on_with(make: Callable[[], Strategy]) -> str:
    module = make_module(Classifier, depth=2)
    make_trainer(devices=2, strategy=FSDPStrategy()).fit(module, make_loader(32), make_loader())
    try:
        make_trainer(devices=2, strategy=make()).test(module, make_loader(), verbose=False)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.some("DDPStrategy")
@pytest.mark.parametrize("make", [DDPStrategy, PipelineStrategy])
def test_strategies_of_whole_parameters_refuse_shards(
    workers: WorkerPool, make: Callable[[], Strategy]
) -> None:
    found = workers.run(2, go_on_with, make)
    assert all("this one computes with whole parameters" in text for text in found), found


class Failing(Synced):
    """Fails on all ranks alike, until told not to."""

    fails = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.fails and batch_idx == 1:
            raise KeyError("a bad batch")
        return loss


def fit_behind_a_failed_run(devices: int) -> str:
    module = make_module(Failing)
    trainer = make_trainer(devices=devices, strategy=FSDPStrategy())
    with pytest.raises((KeyError, RankFailedError)):
        trainer.fit(module, make_loader(), make_loader())
    module.fails = False
    again = make_trainer(devices=devices, strategy=FSDPStrategy())
    try:
        again.fit(module, make_loader(), make_loader())
    except ValueError as error:
        return str(error)
    return f"{again.global_step} steps"


def test_shards_of_a_failed_run_are_refused(workers: WorkerPool) -> None:
    found = workers.run(2, fit_behind_a_failed_run, 2)
    assert all("by an earlier Trainer whose run has failed" in text for text in found), found


def test_a_rank_alone_goes_on_behind_a_failed_run(workers: WorkerPool) -> None:
    assert workers.run(1, fit_behind_a_failed_run, 1) == ["6 steps"]


def copies_of_a_trained_module() -> str:
    module = make_module(Classifier, depth=0)
    trainer = make_trainer(devices=1, strategy=FSDPStrategy(), limit_train_batches=1)
    trainer.fit(module, make_loader(), make_loader())
    return repr(pickle.loads(pickle.dumps(vars(module)["_lightning_dist_sharding"])))


def test_no_copy_takes_itself_for_the_module(workers: WorkerPool) -> None:
    assert workers.run(1, copies_of_a_trained_module) == ["None"]
