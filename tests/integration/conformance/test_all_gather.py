"""``self.all_gather`` gathers over data replicas: ranks of one replica have the same samples."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dist import (
    DDPStrategy,
    FSDPStrategy,
    MeshStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)
from lightning_dist.engine.splitting.config import PipelineConfig
from tests.helpers.networks.models import make_data, make_module, make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import Synced, assert_close, joined, loaders_of
from tests.integration.conformance.strategies import PLAN, Entry

WHOLE = PipelineConfig(num_microbatches=1)  # its loss compares samples
ENTRIES = {
    "ddp": Entry(2, 2, DDPStrategy),
    "fsdp": Entry(2, 2, FSDPStrategy),
    "tp": Entry(2, 1, partial(TensorParallelStrategy, plan=PLAN)),
    "stages": Entry(2, 1, partial(PipelineStrategy, num_microbatches=1)),
    "stages and replicas": Entry(4, 2, partial(PipelineStrategy, num_stages=2, num_microbatches=1)),
    "stages and shards": Entry(4, 2, partial(MeshStrategy, pp=2, pipeline=WHOLE)),
}


class Contrasting(Synced):
    """Takes the samples of all replicas as negatives, and counts them in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.total = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = self.all_gather(self.model(batch[0]), sync_grads=True).reshape(-1, 3)
        self.seen.append(len(rows))
        return torch.logsumexp(rows @ rows.T, dim=-1).mean()

    def on_train_epoch_end(self) -> None:
        rows = torch.arange(16.0).view(2, 8).T  # not contiguous
        gathered = self.all_gather(rows).reshape(-1, 8, 2)
        assert all(torch.equal(each, rows) for each in gathered)
        self.total = float(gathered.sum())


def fit(entry: Entry | None) -> tuple[dict[str, Tensor], list[int], float]:
    module = make_module(Contrasting)
    strategy = "auto" if entry is None else entry.make()
    trainer = make_trainer(
        devices=1 if entry is None else entry.devices, strategy=strategy, limit_val_batches=0
    )
    trainer.fit(module, *loaders_of(trainer, entry))
    return state_of(module), module.seen, module.total


@pytest.mark.some("ddp", "tp", "stages and replicas")
@pytest.mark.parametrize("name", ENTRIES)
def test_a_loss_over_all_samples_is_one_device_s(workers: WorkerPool, name: str) -> None:
    entry = ENTRIES[name]
    expected, seen, total = fit(None)
    assert seen == [8, 8, 4]
    ranks = workers.run(entry.devices, fit, entry)
    assert_close(joined([state for state, _, _ in ranks]), expected)
    assert [seen for _, seen, _ in ranks if seen] != []
    assert all(other in ([], seen) for _, other, _ in ranks)
    assert [here for _, _, here in ranks] == [total * entry.replicas] * entry.devices


def train_unevenly() -> list[float]:
    rank, means = int(os.environ["RANK"]), []

    class Gathering(Synced):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            ranks = self.all_gather(torch.tensor(float(self.global_rank)))
            means.append(float(ranks.mean()))
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(devices=2, strategy=DDPStrategy(uneven_inputs=True), limit_val_batches=0)
    loader = DataLoader(make_data(8 + 4 * rank), batch_size=4)
    trainer.fit(make_module(Gathering), loader, loader)
    return means


def test_ranks_without_data_are_not_waited_for(workers: WorkerPool) -> None:
    assert workers.run(2, train_unevenly) == [[0.5, 0.5], [0.5, 0.5, 1.0]]
