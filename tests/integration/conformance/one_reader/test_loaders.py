"""Each kind of loader gives the ranks of a pipeline what it gives one device."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightning_dist import PipelineStrategy
from tests.helpers.networks.models import (
    make_module,
    make_trainer,
)
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import Synced
from tests.integration.conformance.one_reader.common import (
    BATCH_SIZE,
    NUM_SAMPLES,
    Noisy,
    Watching,
    assert_same,
    seed_this_process,
    shuffled,
)


class ByRank(Sampler[int]):
    """A user's sampler that shuffles on its own."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        rank = int(os.environ.get("RANK", "0"))
        return iter(torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(rank)))


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        data = Noisy()
        while True:
            yield data[random.randrange(NUM_SAMPLES)]


class Listed:
    """An iterable of two batches that may say that there are more."""

    def __init__(self, length: int = 2) -> None:
        self.data = Noisy()
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return (self.data[begin : begin + BATCH_SIZE] for begin in (0, BATCH_SIZE))

    def __len__(self) -> int:
        return self.length


class Leaving(L.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 2 else None


class Peeking(L.Callback):
    """Reads the Trainer's loader by itself, on one rank."""

    def on_train_epoch_start(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.is_global_zero:
            next(iter(trainer.train_dataloader))


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "shuffles by rank": (lambda: shuffled(sampler=ByRank(), shuffle=None), {}),
    "workers": (lambda: shuffled(num_workers=2, persistent_workers=True), {}),
    "endless": (lambda: DataLoader(Endless(), BATCH_SIZE), {"limit_train_batches": 3}),
    "iterable": (Listed, {}),
    "lying": (lambda: Listed(4), {}),
    "overfit": (shuffled, {"overfit_batches": 2}),
    "limited": (shuffled, {"limit_train_batches": 2, "val_check_interval": 1}),
    "left": (shuffled, {"callbacks": [Leaving()]}),
    "peeking": (shuffled, {"callbacks": [Peeking()]}),
    "several": (lambda: {"a": shuffled(), "b": Listed()}, {}),
    "shortest": (lambda: CombinedLoader({"a": shuffled(), "b": Listed()}, "min_size"), {}),
}


class OfFirst(Synced):
    """Trains on the first of several batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = batch["a"] if isinstance(batch, dict) else batch
        return super().training_step(batch, batch_idx)


def fit_cases(devices: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (make, options) in CASES.items():
        watching, module = Watching(), make_module(OfFirst)
        strategy = PipelineStrategy(num_microbatches=2) if devices > 1 else "auto"
        options = {"max_epochs": 2, **options}
        callbacks = [watching, *options.pop("callbacks", [])]
        trainer = make_trainer(devices=devices, strategy=strategy, callbacks=callbacks, **options)
        seed_this_process()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(overfit|persistent_workers).*")
            trainer.fit(module, make(), shuffled(shuffle=False))
        found[name] = watching.batches
    return found


def test_loaders_of_all_kinds_give_what_they_give_on_one_device(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    expected = workers.run(1, fit_cases, 1, timeout=120.0)[0]
    for found in workers.run(2, fit_cases, 2, timeout=240.0):
        for name in CASES:
            assert_same(found[name], expected[name])
