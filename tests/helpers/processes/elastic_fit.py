"""A fit that goes on from its last checkpoint, on as many ranks as there are."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dist import DDPStrategy, FSDPStrategy, MeshStrategy, PipelineStrategy
from lightning_dist.callbacks import Elastic
from tests.helpers.networks.models import make_loader, make_module, make_trainer

STRATEGIES: dict[str, Any] = {
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "1f1b": partial(PipelineStrategy, num_stages=2, schedule="1f1b", num_microbatches=2),
    "mesh": partial(MeshStrategy, pp=2),
}
BATCH_SIZE = 4
PAUSE_SECONDS = 0.05
PAUSE_ALONE_SECONDS = 0.5  # until another rank comes back


class Ends(L.Callback):
    """Asks the run to stop behind a batch; only the first rank is asked."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch and trainer.global_rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)


class Progress(L.Callback):
    """Adds a line for each step, and takes its time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == 0:
            with self.path.open("a") as file:
                file.write(f"{trainer.world_size} {trainer.global_step}\n")
        time.sleep(PAUSE_ALONE_SECONDS if trainer.world_size == 1 else PAUSE_SECONDS)


def fit(
    strategy: str,
    folder: str,
    num_samples: int,
    replicas: int | None,
    *callbacks: L.Callback,
    timeout_s: float = 1800,
) -> int:
    """Trains from the last checkpoint on; gives the steps taken at the end."""
    torch.set_num_threads(1)
    L.seed_everything(5, verbose=False)
    save = ModelCheckpoint(
        folder, save_last=True, save_on_exception=True, every_n_train_steps=2, save_top_k=0
    )
    trainer = make_trainer(
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        strategy=STRATEGIES[strategy](timeout_s=timeout_s),
        callbacks=[Elastic(replicas), save, *callbacks],
        enable_checkpointing=True,
        max_epochs=3,
    )
    module = make_module(optimizer="adamw", schedule_lr=True)
    loaders = make_loader(num_samples, BATCH_SIZE, shuffle=True), make_loader(8)
    last = Path(folder, "last.ckpt")
    trainer.fit(module, *loaders, ckpt_path=str(last) if last.exists() else None)
    return trainer.global_step


if __name__ == "__main__":
    name, to, count = sys.argv[1:]
    fit(name, to, int(count), 2, Progress(Path(to, "progress")), timeout_s=30)
