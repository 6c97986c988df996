"""A run goes on inside of an epoch on another number of ranks, with the steps that it had left."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_dist import DDPStrategy, FSDPStrategy, MeshStrategy, PipelineStrategy
from lightning_dist.callbacks import Elastic
from lightning_dist.checkpoint import load_full
from tests.helpers.networks.models import make_loader, make_module, make_trainer
from tests.helpers.processes.workers import WorkerPool

STRATEGIES: dict[str, Any] = {
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "1f1b": lambda: PipelineStrategy(num_stages=2, schedule="1f1b", num_microbatches=2),
    "mesh": lambda: MeshStrategy(pp=2),
}
NUM_EPOCHS = 3
SAMPLES, BATCH_SIZE = 35, 4  # 8 steps of two replicas make two epochs, and 3 samples are left


class Ends(L.Callback):
    """Asks the run to stop behind a batch; the callback is on one rank alone."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        done = trainer.fit_loop.epoch_loop.batch_progress.total.processed
        if done == self.batch and trainer.global_rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def fit(strategy: str, folder: str, replicas: int | None, end: int | None) -> int:
    """Trains from the last checkpoint on, to a batch or to the end; gives the steps taken."""
    L.seed_everything(5, verbose=False)
    save = ModelCheckpoint(folder, save_last=True, save_on_exception=True)
    trainer = make_trainer(
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=STRATEGIES[strategy](),
        callbacks=[Elastic(replicas), save, *([] if end is None else [Ends(end)])],
        enable_checkpointing=True,
        max_epochs=NUM_EPOCHS,
    )
    module = make_module(optimizer="adamw", schedule_lr=True)
    loaders = make_loader(SAMPLES, BATCH_SIZE, shuffle=True), make_loader(8)
    last = Path(folder, "last.ckpt")
    trainer.fit(module, *loaders, ckpt_path=str(last) if last.exists() else None)
    return trainer.global_step


def end_of_all(strategy: str, folder: str, replicas: int | None, end: int) -> int:
    with pytest.raises(SIGTERMException):
        fit(strategy, folder, replicas, end)
    return 0


def run_through(
    workers: WorkerPool, strategy: str, folder: Path, *, sizes: list[int], ends: list[int]
) -> dict[str, Any]:
    """Trains on worlds of these sizes, each but the last to a batch; gives the last checkpoint."""
    replicas = 2
    for size, end in zip(sizes, ends, strict=False):
        workers.run(size, end_of_all, strategy, str(folder), replicas, end)
    assert set(workers.run(sizes[-1], fit, strategy, str(folder), replicas, None)) == {12}
    return load_full(folder / "last.ckpt")


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=tolerance), name


@pytest.mark.some("fsdp-*")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fewer_and_more_ranks_go_on_with_the_same_steps(
    workers: WorkerPool, tmp_path: Path, strategy: str
) -> None:
    one = 2 if strategy in ("1f1b", "mesh") else 1  # ranks of one replica
    sizes = [2 * one, one, 2 * one]
    found = run_through(workers, strategy, tmp_path / "found", sizes=sizes, ends=[2, 11])
    whole = run_through(workers, strategy, tmp_path / "whole", sizes=[2 * one], ends=[])
    assert_same(found["state_dict"], whole["state_dict"], 1e-12)
