"""A second run goes on with what the module holds, wherever that lies by then."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_dist import FSDPStrategy
from tests.helpers.models import Classifier, make_loader, make_module, make_trainer, state_of
from tests.helpers.workers import WorkerPool
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


@pytest.mark.parametrize("name", ["fsdp-2", "pp-2-shard-2"])
def test_trains_on_parameters_that_lie_elsewhere(workers: WorkerPool, name: str) -> None:
    devices = ENTRIES[name].devices
    expected, found = (joined(workers.run(devices, fit_twice, name, m)) for m in (False, True))
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def fit_by_two_trainers(depth: int) -> str:
    module = make_module(Classifier, depth=depth)
    make_trainer(devices=1, strategy=FSDPStrategy()).fit(module, make_loader(), make_loader())
    again = make_trainer(devices=1, strategy=FSDPStrategy())
    try:
        again.fit(module, make_loader(), make_loader())
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("depth", [0, 2])
def test_another_trainer_is_refused(workers: WorkerPool, depth: int) -> None:
    """Also where there are no blocks, so that the only unit is around the module."""
    (message,) = workers.run(1, fit_by_two_trainers, depth)
    assert "is sharded already, by an earlier Trainer" in message
