"""Another Trainer goes on with a module that a first one has trained, as on one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.networks.models import make_module, state_of
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import (
    Synced,
    assert_close,
    joined,
    loaders_of,
    trainer_of,
)
from tests.integration.conformance.strategies import ENTRIES, TYPICAL

NAMES = [*TYPICAL, "fsdp-2x2", "shard-2-tp-2", "pp-2-tp-2"]


def run_by_four_trainers(name: str | None) -> dict[str, Tensor]:
    """Fits, tests, fits anew with another optimizer, and validates."""
    module = make_module(Synced, optimizer="adamw")
    found: dict[str, Any] = {}
    for run in ("fit", "test", "fit", "validate"):
        trainer, entry = trainer_of(name)
        train, evaluate = loaders_of(trainer, entry)
        if run == "fit":
            trainer.fit(module, train, evaluate)
            module.optimizer = "sgd"
        else:
            (metrics,) = getattr(trainer, run)(module, evaluate, verbose=False)
            found |= metrics
    values = {key: torch.tensor(value, dtype=torch.float64) for key, value in found.items()}
    return {**state_of(module), **values}


@cache
def of_one_device() -> dict[str, Tensor]:
    return run_by_four_trainers(None)


@pytest.mark.some("fsdp-2")
@pytest.mark.parametrize("name", NAMES)
def test_does_what_one_device_does(workers: WorkerPool, name: str) -> None:
    found = workers.run(ENTRIES[name].devices, run_by_four_trainers, name)
    assert_close(joined(found), of_one_device())
