"""A thread writes what a step has left, while later steps go on."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_dist import (
    DDPStrategy,
    FSDPStrategy,
    MeshStrategy,
    PipelineStrategy,
)
from lightning_dist.checkpoint import load_full
from lightning_dist.engine.checkpoint.background import BackgroundSaves
from tests.helpers.networks.models import Classifier, make_loader, make_module, make_trainer
from tests.helpers.processes.workers import CONTEXT, WorkerPool, free_port
from tests.integration.strategies.saving.test_killed_saves import exit_code_of

STRATEGIES: dict[str, tuple[int, Callable[..., Any]]] = {
    "fsdp": (2, FSDPStrategy),
    "pipedream": (2, partial(PipelineStrategy, schedule="pipedream")),
    "mesh": (4, partial(MeshStrategy, pp=2, dp_shard=2)),
    "fsdp, one file": (2, partial(FSDPStrategy, save_full=True)),
    "ddp": (2, DDPStrategy),
}
SAVED_AT, SEEN_AT = 1, 3


@contextmanager
def slow_saves(gate: threading.Event) -> Iterator[None]:
    """Lets each save in the background wait until a gate is open."""
    start = BackgroundSaves.start

    def start_late(saves: BackgroundSaves, write: Callable[[], None]) -> None:
        start(saves, lambda: (gate.wait(), write()))

    with patch.object(BackgroundSaves, "start", start_late):
        yield


class Saves(L.Callback):
    """Saves behind a batch, and looks behind a later one what there is."""

    def __init__(self, path: Path, gate: threading.Event) -> None:
        self.path = path
        self.gate = gate
        self.was_there = True

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        if rest[-1] == SAVED_AT:
            trainer.save_checkpoint(self.path)
        if rest[-1] == SEEN_AT:
            self.was_there = self.path.exists()
            trainer.strategy.barrier()
            self.gate.set()


def train_and_save(name: str, folder: str, is_async: bool) -> bool:
    """Gives whether the checkpoint was there two batches behind the save."""
    size, make = STRATEGIES[name]
    gate = threading.Event()
    saves = Saves(Path(folder, f"{is_async}.ckpt"), gate)
    trainer = make_trainer(strategy=make(async_save=is_async), devices=size, callbacks=[saves])
    with slow_saves(gate):
        trainer.fit(make_module(optimizer="adamw"), make_loader(), make_loader())
    assert saves.path.exists()
    return saves.was_there


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.mark.some("pipedream")
@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_written_later_is_what_was_saved(
    workers: WorkerPool, tmp_path: Path, name: str
) -> None:
    size = STRATEGIES[name][0]
    assert workers.run(size, train_and_save, name, str(tmp_path), False) == [True] * size
    assert workers.run(size, train_and_save, name, str(tmp_path), True) == [False] * size
    now, later = (load_full(tmp_path / f"{is_async}.ckpt") for is_async in (False, True))
    assert later["global_step"] == SAVED_AT + 1
    assert equal(now, later)


class WritingInSteps(Classifier):
    """Lets the thread write while a step runs, in which ranks of a pipeline are shown another."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self.gate = gate

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx in (2, 4):
            self.gate.set()
            time.sleep(0.3)
            self.gate.clear()
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.gate.set()


def save_in_steps(folder: str, save_full: bool) -> None:
    gate = threading.Event()
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_last="link")
    strategy = PipelineStrategy(num_microbatches=1, async_save=True, save_full=save_full)
    trainer = make_trainer(
        strategy=strategy, devices=2, max_epochs=1, enable_checkpointing=True, callbacks=[saves]
    )
    with slow_saves(gate):
        trainer.fit(make_module(WritingInSteps, gate=gate), make_loader(), make_loader())


@pytest.mark.some("False")
@pytest.mark.parametrize("save_full", [False, True])
def test_what_is_written_in_a_step_of_stages_is_written_and_removed_by_the_first_rank(
    workers: WorkerPool, tmp_path: Path, save_full: bool
) -> None:
    workers.run(2, save_in_steps, str(tmp_path), save_full)
    assert {path.name for path in tmp_path.iterdir()} == {"step=6.ckpt", "last.ckpt"}
    assert load_full(tmp_path / "last.ckpt")["global_step"] == 6


class Needs(L.Callback):
    """Saves, and needs the checkpoint one batch later, or ends the run there."""

    def __init__(self, path: str, kind: str, gate: threading.Event) -> None:
        self.path = path
        self.kind = kind
        self.gate = gate
        self.loaded: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        if rest[-1] == SAVED_AT:
            trainer.save_checkpoint(self.path)
            assert not Path(self.path).exists()
        if rest[-1] == SAVED_AT + 1:
            threading.Timer(0.3, self.gate.set).start()
            if self.kind == "load":
                self.loaded = trainer.strategy.load_checkpoint(self.path, weights_only=True)
            else:
                raise KeyError("a mistake in a hook of all ranks")


def save_and_need(path: str, kind: str) -> int:
    """Gives the step of the checkpoint that was loaded, or was there when the run had failed."""
    gate = threading.Event()
    needs = Needs(path, kind, gate)
    trainer = make_trainer(strategy=FSDPStrategy(async_save=True), devices=2, callbacks=[needs])
    with slow_saves(gate):
        if kind == "load":
            trainer.fit(make_module(), make_loader(), make_loader())
            return int(needs.loaded["global_step"])
        with pytest.raises(KeyError, match="all ranks"):
            trainer.fit(make_module(), make_loader(), make_loader())
        return int(load_full(path)["global_step"])


@pytest.mark.some("exception")
@pytest.mark.parametrize("kind", ["load", "exception"])
def test_a_load_and_the_end_wait_for_the_save(
    workers: WorkerPool, tmp_path: Path, kind: str
) -> None:
    found = workers.run(2, save_and_need, str(tmp_path / "some.ckpt"), kind)
    assert found == [SAVED_AT + 1] * 2


class RanOut(L.Callback):
    """Saves behind each batch; from the second save on, the second rank may not write."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.last = 0

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        if rest[-1] == SAVED_AT:
            trainer.strategy.finish_save()
        if rest[-1] == SAVED_AT and trainer.global_rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        trainer.save_checkpoint(self.path)
        self.last = rest[-1]


def save_until_full(path: str, batches: int) -> tuple[str, int, bool]:
    """Gives the error, the last batch with a save, and whether a temporary file is left."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ran_out = RanOut(path)
    trainer = make_trainer(
        strategy=FSDPStrategy(async_save=True),
        devices=2,
        callbacks=[ran_out],
        limit_train_batches=batches,
    )
    try:
        with pytest.raises(OSError, match="was not saved") as caught:
            trainer.fit(make_module(), make_loader(), make_loader())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return str(caught.value), ran_out.last, Path(path).with_name(".some.ckpt.saving").exists()


@pytest.mark.parametrize("batches", [SAVED_AT + 1, 5], ids=["end of training", "next save"])
def test_a_disk_that_is_full_ends_all_ranks_later(
    workers: WorkerPool, tmp_path: Path, batches: int
) -> None:
    first, second = workers.run(2, save_until_full, str(tmp_path / "some.ckpt"), batches)
    assert first == second
    text, last, is_left = first
    assert f"(Rank 1, host {os.uname().nodename}.)" in text
    assert last == SAVED_AT
    assert not is_left
    assert load_full(tmp_path / "some.ckpt")["global_step"] == SAVED_AT


class Epochs(Classifier):
    """Notes its epochs, and lets something happen in the second batch of the second one."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__(depth=1)
        self.meanwhile = meanwhile
        self.begun: list[int] = []

    def on_train_epoch_start(self) -> None:
        self.begun.append(self.current_epoch)

    def on_train_batch_end(self, *rest: Any) -> None:
        if self.current_epoch == 2 and rest[-1] == 1:
            self.meanwhile()


def train(folder: Path, epochs: int, dies: bool = False) -> int:
    """Trains from the last checkpoint, if there is one; gives its first epoch."""
    middle, dead = threading.Event(), threading.Event()

    def open_shard(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and ".epoch=1.ckpt.saving/__0" in str(arguments[0]):
            middle.set()
            dead.wait()

    def die() -> None:
        middle.wait()
        os.kill(os.getpid(), signal.SIGKILL)

    if dies:
        sys.addaudithook(open_shard)
    module = make_module(Epochs, meanwhile=die if dies else lambda: None)
    checkpoint = ModelCheckpoint(folder, filename="{epoch}", save_top_k=1, save_last="link")
    trainer = make_trainer(
        strategy=DDPStrategy(save_full=False, async_save=True),
        devices=1,
        max_epochs=epochs,
        enable_checkpointing=True,
        callbacks=[checkpoint],
    )
    resume = "last" if any(folder.iterdir()) else None
    trainer.fit(module, make_loader(16), make_loader(8), ckpt_path=resume, weights_only=True)
    return int(module.begun[0])


class Troubled(L.Callback):
    """Saves twice; in the second save one rank is killed, or its disk hangs and it raises."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self.kind = kind
        self.is_writing = threading.Event()

    def on_open(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and ".1.ckpt.saving/__1" in str(arguments[0]):
            if self.kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            self.is_writing.set()
            threading.Event().wait()

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        if rest[-1] < 2:
            trainer.save_checkpoint(self.folder / f"{rest[-1]}.ckpt")
        elif trainer.global_rank == 1:
            self.is_writing.wait()
            raise KeyError("a mistake of one rank")


def train_in_trouble(folder: Path, kind: str, rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), NODE_RANK="0")
    troubled = Troubled(folder, kind)
    sys.addaudithook(troubled.on_open)
    strategy = FSDPStrategy(async_save=True)
    trainer = make_trainer(strategy=strategy, devices=2, callbacks=[troubled], max_epochs=1000)
    trainer.fit(make_module(), make_loader(), make_loader())


@pytest.mark.long
@pytest.mark.parametrize(("kind", "code"), [("killed", -signal.SIGKILL), ("hangs", 1)])
def test_a_rank_that_is_lost_in_a_save_ends_the_others(
    tmp_path: Path, kind: str, code: int
) -> None:
    port = free_port()
    ranks = [
        CONTEXT.Process(target=train_in_trouble, args=(tmp_path, kind, rank, port))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(40)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [1, code]
    assert load_full(tmp_path / "0.ckpt")["global_step"] == 1
    assert not (tmp_path / "1.ckpt").exists()


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert exit_code_of(train, tmp_path, 3, True) == -signal.SIGKILL
    assert names_in(tmp_path) == {"epoch=0.ckpt", "last.ckpt", ".epoch=1.ckpt.saving"}
    assert load_full(tmp_path / "last.ckpt")["epoch"] == 0
    assert train(tmp_path, 3) == 1
    # The first checkpoint does not know of the link, so Lightning makes another one.
    links = {"last.ckpt", "last-v1.ckpt"}
    assert names_in(tmp_path) == {"epoch=2.ckpt", *links}
    assert {os.readlink(tmp_path / link) for link in links} == {"epoch=2.ckpt"}
