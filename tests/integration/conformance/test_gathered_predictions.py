"""Whole predictions in order, on each rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_dist.callbacks import GatherPredictions
from lightning_dist.strategies.ddp import DDPStrategy
from tests.helpers.networks.models import make_data, make_module, make_trainer
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import TOLERANCE, Synced
from tests.integration.conformance.strategies import ENTRIES

NUM_SAMPLES = 13  # replicas have different numbers of them
BACKWARDS = list(reversed(range(NUM_SAMPLES)))


class Predictor(Synced):
    """Predicts a structure, with things that are no tensors."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits = super().predict_step(batch, batch_idx)
        return {"logits": logits, "pair": (logits.argmax(-1), [f"{y}" for y in batch[1].tolist()])}


def loaders() -> list[DataLoader[Any]]:
    data = make_data(NUM_SAMPLES)
    return [DataLoader(data, batch_size=4), DataLoader(data, batch_size=4, sampler=BACKWARDS)]


def predict(name: str | None) -> list[Any]:
    entry = ENTRIES[name] if name else None
    trainer = make_trainer(
        devices=entry.devices if entry else 1,
        strategy=entry.make() if entry else "auto",
        use_distributed_sampler=True,
        callbacks=[GatherPredictions()],
    )
    found = trainer.predict(make_module(Predictor), loaders())
    assert found is not None
    assert [len(entries) for entries in found] == [1, 1]
    return [entries[0] for entries in found]  # type: ignore[index]


@pytest.mark.some("ddp-2", "pp-2-shard-2")
@pytest.mark.parametrize("name", ENTRIES)
def test_each_rank_has_what_one_device_has(
    workers: WorkerPool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    module, (images, labels) = make_module(Predictor).eval(), make_data(NUM_SAMPLES).tensors
    with torch.no_grad():
        expected = module.predict_step((images, labels), 0)["logits"]
    for found in [predict(None), *workers.run(ENTRIES[name].devices, predict, name)]:
        for whole in found:
            assert float((whole["logits"] - expected).abs().max()) < TOLERANCE
            classes, names = whole["pair"]
            assert torch.equal(classes, expected.argmax(-1))
            assert names == [f"{y}" for y in labels.tolist()]


def predict_named() -> list[Any]:
    trainer = make_trainer(
        devices=2,
        strategy=DDPStrategy(),
        use_distributed_sampler=True,
        callbacks=[GatherPredictions()],
    )
    first, second = loaders()
    found = trainer.predict(make_module(Predictor), {"a": first, "b": second})
    return [len(whole["logits"]) for [whole] in found or ()]


def test_loaders_in_a_dict_are_a_list(workers: WorkerPool) -> None:
    assert workers.run(2, predict_named) == [[NUM_SAMPLES, NUM_SAMPLES]] * 2


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(make_data(4))


def refuse() -> str:
    trainer = make_trainer(devices=2, strategy=DDPStrategy(), callbacks=[GatherPredictions()])
    with pytest.raises(ValueError, match="cannot order") as error:
        trainer.predict(make_module(Predictor), DataLoader(Endless(), batch_size=2))
    return str(error.value)


def test_samples_without_numbers_are_refused(workers: WorkerPool) -> None:
    assert all("Use a DataLoader" in message for message in workers.run(2, refuse))


class Several(Synced):
    """Predicts another number of rows than it has samples."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        rows = super().predict_step(batch, batch_idx)
        return rows.repeat_interleave(2, 0) if batch_idx == 0 else rows


def refuse_rows(devices: int) -> str:
    strategy = DDPStrategy() if devices > 1 else "auto"
    trainer = make_trainer(
        devices=devices,
        strategy=strategy,
        use_distributed_sampler=True,
        callbacks=[GatherPredictions()],
    )
    with pytest.raises(ValueError, match="cannot tell whose they are") as error:
        trainer.predict(make_module(Several), DataLoader(make_data(8), batch_size=2))
    return str(error.value)


def test_other_numbers_of_rows_are_refused(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for message in workers.run(2, refuse_rows, 2):
        assert "12 rows or entries for 8 samples" in message
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert "10 rows or entries for 8 samples" in refuse_rows(1)
