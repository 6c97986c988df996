"""Ranks of a data replica have the batches that one device would have, whatever is drawn where."""

from __future__ import annotations

import random
import warnings
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dist import PipelineStrategy
from tests.helpers.networks.models import (
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import Synced, assert_close, joined
from tests.integration.conformance.one_reader.common import (
    BATCH_SIZE,
    STRATEGIES,
    Noisy,
    Watching,
    assert_same,
    seed_this_process,
    shuffled,
)


class Drawing(Synced):
    """Draws its data in hooks, and changes batches on their way in place."""

    def __init__(self) -> None:
        super().__init__()
        self.data: list[Noisy] = []

    def loader(self, **options: Any) -> DataLoader[Any]:
        self.data.append(Noisy())
        return DataLoader(self.data[-1], batch_size=BATCH_SIZE, **options)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader()

    def test_dataloader(self) -> DataLoader[Any]:
        return self.loader()

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.loader()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch[0].mul_(torch.rand(()))
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch[0].add_(random.random() + np.random.rand())
        return batch


def run_all(name: str | None) -> Any:
    module, watching = make_module(Drawing), Watching()
    devices, make = STRATEGIES[name] if name else (1, lambda: "auto")
    trainer = make_trainer(
        devices=devices,
        strategy=make(),
        max_epochs=2,
        num_sanity_val_steps=2,
        reload_dataloaders_every_n_epochs=1,
        callbacks=[watching],
        use_distributed_sampler=True,
    )
    seed_this_process()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*DistributedSampler.*")
        trainer.fit(module)
        state = state_of(module)
        (validated,) = trainer.validate(module, verbose=False)
        (tested,) = trainer.test(module, verbose=False)
        predicted = trainer.predict(module)
    assert predicted is not None
    num_read = sum(data.num_read for data in module.data)
    return watching.batches, state, {**validated, **tested}, torch.cat(list(predicted)), num_read


@pytest.mark.some("pp-tp")
@pytest.mark.parametrize("name", ["1f1b", "pipedream", "tp", "pp-tp"])
def test_a_script_that_nobody_seeded_is_as_on_one_device(
    workers: WorkerPool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    batches, state, metrics, predictions, num_read = run_all(None)
    ranks = workers.run(STRATEGIES[name][0], run_all, name, timeout=120.0)
    for found, _, measured, predicted, _ in ranks:
        assert_same(found, batches)
        if name != "pipedream":  # has trained otherwise
            assert measured == pytest.approx(metrics, abs=1e-12)
            assert float((predicted - predictions).abs().max()) < 1e-12
    if name != "pipedream":
        assert_close(joined([rank[1] for rank in ranks]), state)
    assert [rank[-1] for rank in ranks] == [num_read] + [0] * (len(ranks) - 1)


@pytest.mark.some("pp-replicate")
@pytest.mark.parametrize("name", ["pp-replicate", "pipeline-2x2"])
def test_each_replica_has_batches_of_its_own(workers: WorkerPool, name: str) -> None:
    first, second, third, fourth = workers.run(4, run_all, name, timeout=120.0)
    for one, other in ((first, third), (second, fourth)):  # the mesh is pp x dp
        assert_same(one[0], other[0])
        assert one[-1] > other[-1] == 0
    for stage, batches in first[0].items():
        assert not any(map(torch.equal, batches, second[0][stage])), stage


def augment_in_workers() -> list[Tensor]:
    L.seed_everything(11, workers=True)
    watching = Watching()
    loader = shuffled(num_workers=1, persistent_workers=True)
    trainer = make_trainer(
        devices=4,
        strategy=PipelineStrategy(num_stages=2),
        callbacks=[watching],
        use_distributed_sampler=True,
    )
    trainer.fit(make_module(Synced), loader, make_loader(8))
    return watching.batches["train"]


def test_workers_augment_alike_along_a_pipeline_and_not_across_replicas(
    workers: WorkerPool,
) -> None:
    first, second, third, fourth = (torch.cat(b) for b in workers.run(4, augment_in_workers))
    assert torch.equal(first, third)  # the mesh is pp x dp
    assert torch.equal(second, fourth)
    assert not torch.isclose(first, second).any()
