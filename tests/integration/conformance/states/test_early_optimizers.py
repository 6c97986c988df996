"""An optimizer that was made with the module trains what the strategy has made of it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.networks.models import make_module, make_optimizer, state_of
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import (
    Synced,
    assert_close,
    joined,
    loaders_of,
    trainer_of,
)
from tests.integration.conformance.strategies import ENTRIES, TYPICAL


class BuiltEarly(Synced):
    """Makes its optimizer, and a schedule of it, before anything is sharded."""

    def __init__(self) -> None:
        super().__init__()
        matrices = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        self.early = make_optimizer("adamw", [{"params": matrices}, {"params": others}])
        self.early.param_groups[1]["weight_decay"] = 0.0
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.early, 0.5)

    def configure_optimizers(self) -> Any:
        return [self.early], [self.schedule]


def fit(name: str | None) -> dict[str, Tensor]:
    module = make_module(BuiltEarly)
    for _ in range(2):
        trainer, entry = trainer_of(name)
        trainer.fit(module, *loaders_of(trainer, entry))
    return state_of(module)


@cache
def of_one_device() -> dict[str, Tensor]:
    return fit(None)


@pytest.mark.some("fsdp-2")
@pytest.mark.parametrize("name", [*TYPICAL, "fsdp-2x2"])
def test_equals_one_device(workers: WorkerPool, name: str) -> None:
    assert_close(joined(workers.run(ENTRIES[name].devices, fit, name)), of_one_device())
