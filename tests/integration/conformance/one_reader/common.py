"""Strategies with one reader for a data replica, random data, and what a rank sees of it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_dist import MeshStrategy, PipelineStrategy, TensorParallelStrategy
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from tests.integration.conformance.strategies import HALVES, PLAN

NUM_SAMPLES = 24
BATCH_SIZE = 4
MESH = partial(MeshStrategy, pp=2, pipeline=HALVES)
STRATEGIES: dict[str, tuple[int, Callable[[], Any]]] = {
    "1f1b": (2, lambda: PipelineStrategy(num_microbatches=2)),
    "pipedream": (3, lambda: PipelineStrategy(schedule="pipedream")),
    "tp": (2, lambda: TensorParallelStrategy(plan=PLAN)),
    "pp-tp": (4, lambda: MESH(tp=2, tensor=TensorConfig(plan=PLAN))),
    "pp-replicate": (4, lambda: MESH(dp_replicate=2, dp_shard=1)),
    "pipeline-2x2": (4, lambda: PipelineStrategy(num_stages=2)),
}


def seed_this_process() -> None:
    """Leaves the generators as in unseeded processes; the first rank's are one device's."""
    seed = int(os.environ.get("RANK", "0"))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Is drawn at random, and augments with each generator; counts what is read."""

    def __init__(self, size: int = NUM_SAMPLES) -> None:
        self.x = torch.rand(size, 2, 6, dtype=torch.float64)
        self.y = torch.randint(0, 3, (size,))
        self.num_read = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> tuple[Tensor, Tensor]:
        self.num_read += 1
        noise = random.random() + np.random.rand() + float(torch.rand(()))
        return self.x[index] + noise, self.y[index]


class Watching(L.Callback):
    """Keeps the batches, as they are when steps begin; draws on one rank alone."""

    def __init__(self) -> None:
        self.batches: dict[str, list[Tensor]] = {}

    def keep(self, stage: str, batch: Any) -> None:
        if isinstance(batch, dict):
            batch = next(iter(batch.values()))
        self.batches.setdefault(stage, []).append(batch[0].clone())

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.keep("train", batch)
        if trainer.is_global_zero:
            torch.rand(3)

    def on_validation_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.keep("sanity" if trainer.sanity_checking else "validate", batch)

    def on_test_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.keep("test", batch)

    def on_predict_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.keep("predict", batch)


def assert_same(found: dict[str, list[Tensor]], expected: dict[str, list[Tensor]]) -> None:
    assert found.keys() == expected.keys()
    for stage, batches in expected.items():
        assert len(found[stage]) == len(batches), stage
        assert all(map(torch.equal, found[stage], batches)), stage


def shuffled(**options: Any) -> DataLoader[Any]:
    if options.get("num_workers"):
        # The processes that the tests run in were spawned, and would spawn in their turn.
        options["multiprocessing_context"] = "fork"
    return DataLoader(Noisy(), **{"batch_size": BATCH_SIZE, "shuffle": True, **options})
