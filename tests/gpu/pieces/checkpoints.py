"""How long saving and loading a checkpoint take, and for how long an asynchronous save holds up."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_dist import DDPStrategy, FSDPStrategy, PipelineStrategy
from tests.gpu.pieces.memory import sizes_of
from tests.gpu.pieces.speed import Trained, loader_of
from tests.gpu.ranks import attempt, trainer_of
from tests.gpu.records import Row
from tests.gpu.setting import Setting

MIB = 2**20
SAVED_BATCH = 2
SAVES: dict[str, Callable[[], Any]] = {
    "ddp, one file": DDPStrategy,
    "fsdp, a directory": partial(FSDPStrategy, save_full=False),
    "fsdp, one file": partial(FSDPStrategy, save_full=True),
    "pipeline, a directory": partial(PipelineStrategy, num_microbatches=1, save_full=False),
}
STALLS: dict[str, Callable[[], Any]] = {
    "ddp, AsyncCheckpointIO": lambda: DDPStrategy(checkpoint_io=AsyncCheckpointIO()),
    "ddp, async_save": partial(DDPStrategy, async_save=True),
    "fsdp, async_save": partial(FSDPStrategy, save_full=False, async_save=True),
}


class Saves(L.Callback):
    """Saves once between two steps, and times that."""

    def __init__(self, setting: Setting, path: Path) -> None:
        self._setting = setting
        self._path = path
        self.seconds = self.raw_seconds = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        if rest[-1] != SAVED_BATCH:
            return
        state = [trainer.lightning_module.state_dict(), trainer.optimizers[0].state_dict()]
        self.raw_seconds = self._timed(lambda: torch.save(state, self._path.with_name("raw")))
        self.seconds = self._timed(lambda: trainer.save_checkpoint(self._path))

    def _timed(self, work: Callable[[], Any]) -> float:
        self._setting.synchronize()
        began = time.perf_counter()
        work()
        return time.perf_counter() - began


class FirstBatch(L.Callback):
    """Notes when training begins."""

    when = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self.when = self.when or time.perf_counter()


def checkpoints(setting: Setting) -> Iterator[Row]:
    for name, make in SAVES.items():
        yield attempt(name, partial(_times, name, setting, make))
    for name, make in STALLS.items():
        yield attempt(name, partial(_stall, name, setting, make))


def _times(what: str, setting: Setting, make: Callable[[], Any]) -> Row:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "saved.ckpt"
        saves = Saves(setting, path)
        _fit(setting, make(), saves)
        size = sum(f.stat().st_size for f in (path, *path.rglob("*")) if f.is_file())
        load = _until_training(setting, make(), path) - _until_training(setting, make(), None)
    return Row(
        what,
        f"saved in {saves.seconds:.2f} s, loaded in {load:.2f} s, {size / MIB:,.0f} MiB;"
        f" torch.save of the same {saves.raw_seconds:.2f} s",
    )


def _stall(what: str, setting: Setting, make: Callable[[], Any]) -> Row:
    with tempfile.TemporaryDirectory() as directory:
        saves = Saves(setting, Path(directory) / "saved.ckpt")
        _fit(setting, make(), saves)
    found = f"holds up training for {saves.seconds:.2f} s; torch.save {saves.raw_seconds:.2f} s"
    return Row(what, found)


def _until_training(setting: Setting, strategy: Any, path: Path | None) -> float:
    """Returns the seconds from the call of ``fit`` to its first batch."""
    first = FirstBatch()
    began = time.perf_counter()
    _fit(setting, strategy, first, ckpt_path=None if path is None else str(path))
    return first.when - began


def _fit(setting: Setting, strategy: Any, callback: L.Callback, **arguments: Any) -> None:
    sizes = sizes_of(setting)
    options = {"callbacks": [callback], "limit_val_batches": 0, "max_epochs": 1}
    trainer = trainer_of(setting, strategy, **options)
    trainer.fit(Trained(sizes), loader_of(setting, sizes, SAVED_BATCH + 3), **arguments)
