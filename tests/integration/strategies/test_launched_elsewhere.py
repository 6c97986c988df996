"""Processes of a launcher that knows the ranks itself, as Ray does: `devices` says nothing then."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_dist import DDPStrategy, FSDPStrategy, PipelineStrategy
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool

STRATEGIES: dict[str, Any] = {"ddp": DDPStrategy, "fsdp": FSDPStrategy, "1f1b": PipelineStrategy}


class Elsewhere(LightningEnvironment):
    def __init__(self) -> None:
        super().__init__()
        self.size, self.rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])

    def world_size(self) -> int:
        return self.size

    def set_world_size(self, size: int) -> None:
        """Does nothing: the launcher has decided."""

    def global_rank(self) -> int:
        return self.rank

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the launcher has decided."""


def fit(strategy: str, devices: Any) -> Any:
    module = make_module(Classifier)
    plugins = [Elsewhere()] if devices == "auto" else []
    trainer = make_trainer(devices=devices, strategy=STRATEGIES[strategy](), plugins=plugins)
    trainer.fit(module, make_loader(), make_loader())
    return trainer.world_size, state_of(module)


@pytest.mark.some("fsdp")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_auto_takes_the_processes_that_there_are(workers: WorkerPool, strategy: str) -> None:
    expected = workers.run(2, fit, strategy, 2)
    found = workers.run(2, fit, strategy, "auto")
    for (size, state), (_, expected_state) in zip(found, expected, strict=True):
        assert size == 2
        torch.testing.assert_close(state, expected_state, rtol=0, atol=1e-12)


def refused() -> str:
    trainer = make_trainer(devices=1, strategy=DDPStrategy())
    with pytest.raises(ValueError, match="Give the Trainer as many") as caught:
        trainer.fit(make_module(Classifier), make_loader())
    return str(caught.value)


def test_another_number_of_processes_than_the_launchers_is_refused(workers: WorkerPool) -> None:
    first, second = workers.run(2, refused)
    assert first == second
    assert "1 in all, and WORLD_SIZE=2" in first
