"""All stages of a pipeline read the same batches, or the run ends with an error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_dist import PipelineStrategy
from tests.helpers.models import make_data, make_loader, make_module, make_trainer
from tests.helpers.workers import WorkerPool


class ByRank(Sampler[int]):
    """A user's sampler that shuffles on its own."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        rank = int(os.environ["RANK"])
        return iter(torch.randperm(self.size, generator=torch.Generator().manual_seed(rank)))


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Augments with numpy's global random numbers."""

    def __init__(self, size: int) -> None:
        self.data = make_data(size)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.data[index]
        return x + np.random.rand(), y


def refused(schedule: str, where: str) -> tuple[str, str]:
    torch.manual_seed(7)
    good, bad = (DataLoader(make_data(32), 8, sampler=s) for s in (None, ByRank(32)))
    trainer = make_trainer(devices=2, strategy=PipelineStrategy(schedule=schedule))
    try:
        trainer.fit(make_module(), *((bad, good) if where == "training" else (good, bad)))
    except Exception as error:
        return type(error).__name__, str(error).splitlines()[0]
    return "nothing", ""


@pytest.mark.parametrize("where", ["training", "validation"])
@pytest.mark.parametrize("schedule", ["gpipe", "pipedream"])
def test_other_samples_on_another_stage_are_refused(
    workers: WorkerPool, schedule: str, where: str
) -> None:
    for kind, text in workers.run(2, refused, schedule, where):
        assert kind == "ValueError"
        assert "read different batches" in text


class Watching(L.Callback):
    def __init__(self) -> None:
        self.batches: list[Tensor] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches.append(batch[0].clone())


def augment_in_workers() -> list[Tensor]:
    L.seed_everything(11, workers=True)
    watching = Watching()
    loader = DataLoader(
        Noisy(32),
        batch_size=4,
        num_workers=1,
        persistent_workers=True,
        # The processes that the tests run in were spawned, and would spawn in their turn.
        multiprocessing_context="fork",
    )
    trainer = make_trainer(
        devices=4,
        strategy=PipelineStrategy(num_stages=2),
        callbacks=[watching],
        use_distributed_sampler=True,
    )
    trainer.fit(make_module(), loader, make_loader(8))
    return watching.batches


def test_workers_augment_alike_along_a_pipeline_and_not_across_replicas(
    workers: WorkerPool,
) -> None:
    first, second, third, fourth = (torch.cat(b) for b in workers.run(4, augment_in_workers))
    for one, other in ((first, third), (second, fourth)):  # the mesh is pp x dp
        assert torch.equal(one, other)
    plain = [make_data(32)[i][0] for i in range(32)]
    noise = [
        {round(float((x - y).mean()), 6) for x, y in zip(seen, plain[rank::2], strict=True)}
        for rank, seen in enumerate((first, second))
    ]
    assert not noise[0] & noise[1]
