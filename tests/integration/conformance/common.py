"""What the conformance tests share: a module, its data by global batch, comparisons."""

from __future__ import annotations

from typing import Any

import lightning as L
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from tests.helpers.networks.models import Classifier, make_data, make_trainer
from tests.integration.conformance.strategies import EIGHT, ENTRIES, Entry

TOLERANCE = 1e-10
GLOBAL_BATCH = 8
TRAIN_SAMPLES = 20  # six batches in two epochs, the last of each half as large
STEPS_OF_AN_EPOCH = 3
EVALUATION_SAMPLES = 12
DEPTH = 3


class Synced(Classifier):
    """Asks for its metrics over all ranks, as users of data parallelism must."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(depth=DEPTH, **kwargs)

    def log(self, *args: Any, **kwargs: Any) -> None:
        super().log(*args, **{**kwargs, "sync_dist": True})


def trainer_of(name: str | None, **options: Any) -> tuple[L.Trainer, Entry | None]:
    """Builds a trainer with a strategy, or one for a single device."""
    entry = {**ENTRIES, **EIGHT}[name] if name else None
    trainer = make_trainer(
        devices=entry.devices if entry else 1,
        strategy=entry.make() if entry else "auto",
        **options,
    )
    return trainer, entry


def loaders_of(trainer: L.Trainer, entry: Entry | None) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Makes what to train on, and what to validate on."""
    return share(trainer, entry, TRAIN_SAMPLES), share(trainer, entry, EVALUATION_SAMPLES)


def share(trainer: L.Trainer, entry: Entry | None, size: int) -> DataLoader[Any]:
    """Shares each global batch out among the replicas."""
    data = make_data(size)
    if entry is None:
        return DataLoader(data, batch_size=GLOBAL_BATCH)
    place = trainer.strategy.distributed_sampler_kwargs
    assert place["num_replicas"] == entry.replicas
    sampler = DistributedSampler(data, shuffle=False, **place)
    return DataLoader(data, batch_size=GLOBAL_BATCH // entry.replicas, sampler=sampler)


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: value for part in parts for name, value in part.items()}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert float((actual[name] - value).abs().max()) < TOLERANCE, name
