"""A fit that a launcher starts again until it comes through, from its last checkpoint."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy

from lightning_dist import (
    DDPStrategy,
    FSDPStrategy,
    MeshStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)
from lightning_dist.callbacks import Elastic
from tests.helpers.networks.models import make_loader, make_module, make_trainer, state_of

NUM_EPOCHS = 3
NUM_SAMPLES = 48  # 3 steps of two replicas, 6 of one
STEPS_OF_TROUBLE = (4, 7)  # in an epoch of either, and before a save of either
STEPS_OF_BEGIN = (0, 4, 6)  # of each attempt


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


TENSOR_PLAN = {"model.[0-3].linear": "colwise_gather"}
STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "tensor": partial(TensorParallelStrategy, plan=TENSOR_PLAN),
    "mesh": partial(MeshStrategy, pp=2),
    **{
        name: partial(PipelineStrategy, schedule=name)
        for name in ("1f1b", "pipedream", "pipedream_2bw")
    },
}


def world_of(name: str) -> int:
    return 4 if name == "mesh" else 2


def train(name: str, folder: str, *troubles: str) -> int:
    """Trains, with one trouble for each of the first attempts; gives the step of its begin."""
    torch.set_num_threads(1)
    attempt = len(list(Path(folder).glob("trouble.*")))
    save = ModelCheckpoint(folder, save_last=True, every_n_train_steps=2)
    callbacks: list[L.Callback] = [Elastic(), save]
    if attempt < len(troubles):
        at = STEPS_OF_TROUBLE[attempt]
        callbacks.append(Trouble(troubles[attempt], at, Path(folder, f"trouble.{attempt}")))
    module = make_module(depth=4, optimizer="adamw", schedule_lr=True)
    begun: list[int] = []
    module.on_train_start = lambda: begun.append(trainer.global_step)
    trainer = make_trainer(
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", world_of(name))),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        strategy=STRATEGIES[name](timeout_s=60),
        callbacks=callbacks,
        max_epochs=NUM_EPOCHS,
        enable_checkpointing=True,
        default_root_dir=folder,
    )
    resume = "last" if attempt else None
    loaders = make_loader(NUM_SAMPLES, shuffle=True), make_loader(8)
    trainer.fit(module, *loaders, ckpt_path=resume, weights_only=True)
    torch.save(state_of(module), Path(folder, f"weights.{trainer.global_rank}"))
    return begun[0]


if __name__ == "__main__":
    print(f"has begun at step {train(*sys.argv[1:])}")
