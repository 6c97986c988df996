"""A fit in which something goes wrong, on one rank and at one step."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightning_dist import (
    DDPStrategy,
    FSDPStrategy,
    MeshStrategy,
    ParameterServerStrategy,
    PipelineStrategy,
)
from tests.helpers.networks.models import Classifier, make_loader, make_module, make_trainer

TASKS = ("fit", "validate", "predict", "fit, validate")


class Trouble(nn.Module):
    """A layer that does something at its n-th training forward on one rank."""

    def __init__(self, what: str, at: int, rank: int, mark: str | None) -> None:
        super().__init__()
        self.mark = mark
        self.what = what
        self.at = at
        self.rank = rank
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if not self.training or int(os.environ.get("LOCAL_RANK", "0")) != self.rank:
            return x
        if self.calls != self.at or self.what == "none":
            return x
        if self.mark is not None:  # from now on the clock ticks
            Path(self.mark).touch()
        if self.what == "raise later":
            time.sleep(0.5)
        if self.what == "read a pipe":
            read_pipe(f"{self.mark}.pipe")
        if self.what.startswith("raise"):
            raise KeyError("the user's own mistake")
        if self.what == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        return x


def read_pipe(path: str) -> None:
    """Waits as for a file system that does not answer."""
    with open(path) as pipe:
        pipe.read()


class StuckCheckpointIO(TorchCheckpointIO):
    """Writes its first checkpoint when a pipe has been written to."""

    def __init__(self, mark: str) -> None:
        self.mark = Path(mark)

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        if not self.mark.exists():
            self.mark.touch()
            read_pipe(f"{self.mark}.pipe")
        super().save_checkpoint(checkpoint, path, storage_options)


class Report(L.Callback):
    def __init__(self, path: str | None, pause: float) -> None:
        self.path = path
        self.pause = pause
        self.num_batches = 0

    def _write(self, trainer: L.Trainer, *_: Any) -> None:
        self.num_batches += 1
        if self.path is not None and not trainer.sanity_checking:
            with open(f"{self.path}.{trainer.global_rank}", "a") as file:
                file.write(f"{self.num_batches} {time.time()}\n")
        time.sleep(self.pause)

    on_train_batch_end = on_validation_batch_end = on_predict_batch_end = _write


class Told(L.Callback):
    """Gets a signal in one of its hooks, on one rank."""

    def __init__(self, hook: str, rank: int, number: signal.Signals, mark: str | None) -> None:
        self.rank = rank
        self.number = number
        self.mark = mark
        setattr(self, hook, self._signal)

    def _signal(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_rank == self.rank:
            if self.mark is not None:
                Path(self.mark).touch()
            os.kill(os.getpid(), self.number)


def run() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", default="fit", choices=TASKS)
    world_size = int(os.environ.get("WORLD_SIZE", "2"))
    parser.add_argument("--devices", type=int, default=world_size)
    parser.add_argument("--stage", type=int, default=0, help="the rank with the trouble")
    parser.add_argument("--trouble", default="none")
    parser.add_argument("--sigterm-in", default=None, help="a callback's hook")
    parser.add_argument("--sigkill-in", default=None, help="a callback's hook")
    parser.add_argument("--mark", default=None, help="a file to make when the trouble begins")
    parser.add_argument("--at", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=120)
    parser.add_argument(
        "--schedule", default="pipedream", help="or ddp, fsdp, mesh, sync, async, bounded"
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--root", default=None)
    parser.add_argument("--report", default=None)
    parser.add_argument("--pause", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    module: Classifier = make_module(Classifier)
    counts = [2] * (options.devices - 1)
    counts.append(len(module.model) - sum(counts))
    place = sum(counts[: options.stage])
    module.model[place] = nn.Sequential(
        module.model[place], Trouble(options.trouble, options.at, options.stage, options.mark)
    )
    callbacks: list[L.Callback] = [Report(options.report, options.pause)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        if hook := getattr(options, f"{number.name.lower()}_in"):
            callbacks.append(Told(hook, options.stage, number, options.mark))
    if options.root:
        directory = Path(options.root)
        callbacks.append(
            ModelCheckpoint(directory, every_n_train_steps=3, save_top_k=-1, save_on_exception=True)
        )
    strategy: Strategy
    if options.schedule == "ddp":
        strategy = DDPStrategy(timeout_s=options.timeout)
    elif options.schedule == "fsdp":
        strategy = FSDPStrategy(timeout_s=options.timeout)
    elif options.schedule in ("sync", "async", "bounded"):
        bound = 1 if options.schedule == "bounded" else None
        strategy = ParameterServerStrategy(options.schedule, bound, timeout_s=options.timeout)
    elif options.schedule == "mesh":
        strategy = MeshStrategy(pp=2, timeout_s=options.timeout)
    else:
        strategy = PipelineStrategy(
            schedule=options.schedule,
            partition=counts,
            timeout_s=options.timeout,
            log_staleness=True,  # its numbers are on their way when trouble comes
            log_discrepancy=True,
        )
    is_stuck = options.trouble == "save into a pipe"
    trainer = make_trainer(
        plugins=[StuckCheckpointIO(options.mark)] if is_stuck else None,
        devices=options.devices,
        strategy=strategy,
        callbacks=callbacks,
        enable_checkpointing=bool(options.root),
        max_epochs=options.epochs,
        default_root_dir=options.root,
    )
    if options.task.startswith("fit"):
        trainer.fit(module, make_loader(), make_loader(16))
        print(f"rank {trainer.global_rank} has fitted", file=sys.stderr)
    if options.task == "fit, validate":
        trainer.validate(module, make_loader())
    elif options.task != "fit":
        getattr(trainer, options.task)(module, make_loader(4000))
    print(f"rank {trainer.global_rank} done after {trainer.global_step} steps", file=sys.stderr)
