"""What a run has held is free again when nobody holds its trainer any more."""

from __future__ import annotations

import gc
from weakref import ref

import pytest

from tests.helpers.networks.models import make_module
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import Synced, loaders_of, trainer_of
from tests.integration.conformance.strategies import ENTRIES, TYPICAL


def left_by_a_run(name: str) -> list[str]:
    module = make_module(Synced, optimizer="adamw")
    trainer, entry = trainer_of(name)
    trainer.fit(module, *loaders_of(trainer, entry))
    watched = [ref(module), ref(trainer), ref(trainer.strategy), *map(ref, module.parameters())]
    del module, trainer
    gc.collect()
    return [type(found).__name__ for watch in watched if (found := watch()) is not None]


@pytest.mark.some("fsdp-2", "pipeline-gpipe-2", "tp-2")
@pytest.mark.parametrize("name", TYPICAL)
def test_nothing_is_left(workers: WorkerPool, name: str) -> None:
    devices = ENTRIES[name].devices
    assert workers.run(devices, left_by_a_run, name) == [[]] * devices
