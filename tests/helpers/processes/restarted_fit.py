"""A fit that a launcher starts again until it comes through, from its last checkpoint."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy

from lightning_dist import DDPStrategy, PipelineStrategy
from tests.helpers.networks.models import make_loader, make_module, make_trainer, state_of

NUM_EPOCHS = 3
BATCHES_OF_EPOCH = 3


class Trouble(L.Callback):
    """Ends rank 1's process in the middle of an epoch.

    Args:
        kind: What happens: ``"sigkill"`` or ``"raise"``.
        at: The step before which it happens.
        mark: A file to make then.
    """

    def __init__(self, kind: str, at: int, mark: Path) -> None:
        self.kind = kind
        self.at = at
        self.mark = mark

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step != self.at or trainer.global_rank != 1:
            return
        self.mark.touch()
        if self.kind == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("the user's own mistake")


def strategy_of(name: str) -> Strategy:
    if name == "ddp":
        return DDPStrategy(timeout_s=60)
    return PipelineStrategy(schedule=name, timeout_s=60)  # type: ignore[arg-type]


def train(name: str, folder: str, *troubles: str) -> int:
    """Trains, with one trouble for each of the first attempts; gives the epoch of its begin."""
    torch.set_num_threads(1)
    attempt = len(list(Path(folder).glob("trouble.*")))
    callbacks: list[L.Callback] = [ModelCheckpoint(folder, save_last=True)]
    if attempt < len(troubles):
        at = (attempt + 1) * BATCHES_OF_EPOCH + 1  # each attempt completes an epoch more
        callbacks.append(Trouble(troubles[attempt], at, Path(folder, f"trouble.{attempt}")))
    module = make_module(depth=4, optimizer="adamw", schedule_lr=True)
    begun: list[int] = []
    module.on_train_epoch_start = lambda: begun.append(trainer.current_epoch)
    trainer = make_trainer(
        devices=2,
        strategy=strategy_of(name),
        callbacks=callbacks,
        max_epochs=NUM_EPOCHS,
        enable_checkpointing=True,
        default_root_dir=folder,
    )
    resume = "last" if attempt else None
    loaders = make_loader(8 * BATCHES_OF_EPOCH), make_loader(8)
    trainer.fit(module, *loaders, ckpt_path=resume, weights_only=True)
    torch.save(state_of(module), Path(folder, f"weights.{trainer.global_rank}"))
    return begun[0]


if __name__ == "__main__":
    print(f"has begun in epoch {train(*sys.argv[1:])}")
