"""Validate, test and predict without training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.networks.models import make_module
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import (
    EVALUATION_SAMPLES,
    TOLERANCE,
    Synced,
    share,
    trainer_of,
)
from tests.integration.conformance.strategies import ENTRIES


def evaluate(name: str | None) -> Any:
    module = make_module(Synced)
    trainer, entry = trainer_of(name)
    (validated,) = trainer.validate(
        module, share(trainer, entry, EVALUATION_SAMPLES), verbose=False
    )
    (tested,) = trainer.test(module, share(trainer, entry, EVALUATION_SAMPLES), verbose=False)
    predicted = trainer.predict(module, share(trainer, entry, EVALUATION_SAMPLES))
    assert predicted is not None
    place = trainer.strategy.distributed_sampler_kwargs["rank"] if entry else 0
    return {**validated, **tested}, torch.cat(list(predicted)), place


@pytest.mark.some("ddp-2", "fsdp-2", "pipeline-gpipe-2", "pp-2-tp-2")
@pytest.mark.parametrize("name", ENTRIES)
def test_equals_a_single_device(
    workers: WorkerPool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    entry = ENTRIES[name]
    metrics, predictions, _ = evaluate(None)
    ranks = workers.run(entry.devices, evaluate, name)
    assert {place for _, _, place in ranks} == set(range(entry.replicas))
    for found, predicted, place in ranks:
        assert found == pytest.approx(metrics, abs=TOLERANCE)
        own = predictions[place :: entry.replicas]
        assert float((predicted - own).abs().max()) < TOLERANCE
