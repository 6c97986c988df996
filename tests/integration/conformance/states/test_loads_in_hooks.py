"""Hooks may load a whole model's state, as on one device, wherever its layers and shards are."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.networks.models import make_module, state_of
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import (
    Synced,
    assert_close,
    joined,
    loaders_of,
    trainer_of,
)
from tests.integration.conformance.strategies import ENTRIES


def state_like(module: nn.Module, factor: float) -> dict[str, Tensor]:
    """Makes a whole state with values of its own."""
    return {
        name: torch.linspace(-factor, factor, value.numel()).double().reshape(value.shape)
        if value.is_floating_point()
        else value.clone()
        for name, value in module.state_dict().items()
    }


class Reloading(Synced):
    """Begins with other weights, as a model that is finetuned, and goes back to others."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.first, self.second = state_like(self, 0.5), state_like(self.model, 0.3)

    def on_fit_start(self) -> None:
        self.load_state_dict(self.first)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.model.load_state_dict(self.second)


def fit(name: str | None) -> dict[str, Tensor]:
    module = make_module(Reloading, optimizer="adamw")
    trainer, entry = trainer_of(name, max_epochs=2)
    trainer.fit(module, *loaders_of(trainer, entry))
    return state_of(module)


single_device = cache(lambda: fit(None))


@pytest.mark.some("pipeline-1f1b-4", "fsdp-2x2", "tp-2", "pp-2-shard-2")
@pytest.mark.parametrize("name", ENTRIES)
def test_a_hook_may_load_a_whole_state(workers: WorkerPool, name: str) -> None:
    parts = workers.run(ENTRIES[name].devices, fit, name, timeout=120.0)
    assert_close(joined(parts), single_device())
