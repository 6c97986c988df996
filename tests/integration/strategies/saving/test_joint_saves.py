"""Ranks save together or not at all: with one path, one disk, one error."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_dist import DDPStrategy, FSDPStrategy, PipelineStrategy
from lightning_dist.checkpoint import load_full
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "pipeline": PipelineStrategy,
    "pipeline, one file": partial(PipelineStrategy, save_full=True),
    "fsdp": FSDPStrategy,
    "ddp": DDPStrategy,
}


class Named(Classifier):
    """Logs what each rank has another value of."""

    def on_train_epoch_end(self) -> None:
        self.log("mine", float(self.global_rank))


def trained(name: str, **options: Any) -> L.Trainer:
    trainer = make_trainer(strategy=STRATEGIES[name](), devices=2, **options)
    trainer.fit(make_module(Named, depth=2), make_loader(8), make_loader(8))
    return trainer


def save_by_rank(name: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Saves to a path that is this rank's, and gives the weights then and when resumed."""
    options = {"filename": "{mine:.1f}-{epoch}", "monitor": "mine"}
    callback = ModelCheckpoint(folder, **options)
    trainer = trained(name, callbacks=[callback], enable_checkpointing=True)
    before = state_of(trainer.lightning_module)
    module = make_module(Named, depth=2)
    again = make_trainer(
        strategy=STRATEGIES[name](),
        devices=2,
        callbacks=[ModelCheckpoint(folder, **options)],
        enable_checkpointing=True,
    )
    path = callback.best_model_path
    assert path.endswith(f"mine={float(trainer.global_rank)}-epoch=0.ckpt")
    again.fit(module, make_loader(8), make_loader(8), ckpt_path=path, weights_only=True)
    return before, state_of(module)


@pytest.mark.some("pipeline", "fsdp")
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_first_ranks_path_is_all_ranks(workers: WorkerPool, tmp_path: Path, name: str) -> None:
    ranks = workers.run(2, save_by_rank, name, str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["mine=0.0-epoch=0.ckpt"]
    saved = load_full(tmp_path / "mine=0.0-epoch=0.ckpt")["state_dict"]
    for before, resumed in ranks:
        assert before.keys() == resumed.keys()
        for parameter, value in before.items():
            assert torch.equal(resumed[parameter], value)
            assert torch.equal(saved[parameter], value)


def save_from_own_directory(folder: str) -> list[str]:
    """Saves to a relative path, and resumes from it, in a working directory that is this rank's."""
    trainer = trained("pipeline")
    again = make_trainer(strategy=PipelineStrategy(), devices=2, max_epochs=2)
    module = make_module(Named, depth=2)
    own = Path(folder, os.environ["RANK"])
    own.mkdir(exist_ok=True)
    before = Path.cwd()
    os.chdir(own)
    try:
        trainer.save_checkpoint("some.ckpt")
        again.fit(module, make_loader(8), make_loader(8), ckpt_path="some.ckpt", weights_only=True)
    finally:
        os.chdir(before)
    return sorted(os.listdir(own))


def test_a_relative_path_is_the_first_ranks(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(2, save_from_own_directory, str(tmp_path)) == [["some.ckpt"], []]


def save_on_own_disk(name: str, folder: str) -> tuple[str, list[str]]:
    """Saves to a path that is another directory on each rank, as on hosts with their own disks."""
    trainer = trained(name)
    own = Path(folder, os.environ["RANK"])
    own.mkdir(exist_ok=True)
    before = Path.cwd()
    os.chdir(own)
    try:
        trainer.save_checkpoint("/proc/self/cwd/some.ckpt")
    except ValueError as error:
        return str(error), os.listdir(own)
    finally:
        trainer.strategy.barrier()
        os.chdir(before)
    return "", os.listdir(own)


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/cwd"), reason="needs /proc")
@pytest.mark.parametrize("name", ["pipeline", "fsdp"])
def test_ranks_that_see_other_disks_say_so(workers: WorkerPool, tmp_path: Path, name: str) -> None:
    ranks = workers.run(2, save_on_own_disk, name, str(tmp_path))
    host = os.uname().nodename
    for text, left in ranks:
        assert text == ranks[0][0]
        assert f"rank 1 (host {host}) cannot see the disk that rank 0 (host {host})" in text
        assert "save_full=True" in text
        assert left == []


@pytest.mark.skipif(not os.path.exists("/proc/self/cwd"), reason="needs /proc")
def test_one_file_needs_one_disk_only(workers: WorkerPool, tmp_path: Path) -> None:
    ranks = workers.run(2, save_on_own_disk, "pipeline, one file", str(tmp_path))
    assert [(text, left) for text, left in ranks] == [("", ["some.ckpt"]), ("", [])]


def resume_where_one_sees_it(folder: str) -> str:
    own = Path(folder, os.environ["RANK"])
    own.mkdir(exist_ok=True)
    before = Path.cwd()
    module = make_module(Named, depth=2)
    trainer = make_trainer(strategy=PipelineStrategy(save_full=True), devices=2)
    os.chdir(own)
    path = "/proc/self/cwd/some.ckpt"
    try:
        trainer.fit(module, make_loader(8), make_loader(8), ckpt_path=path, weights_only=True)
    except ValueError as error:
        return str(error)
    finally:
        os.chdir(before)
    return ""


@pytest.mark.skipif(not os.path.exists("/proc/self/cwd"), reason="needs /proc")
def test_a_checkpoint_that_some_ranks_cannot_see_is_refused_on_all(
    workers: WorkerPool, tmp_path: Path
) -> None:
    workers.run(2, save_on_own_disk, "pipeline, one file", str(tmp_path))
    first, second = workers.run(2, resume_where_one_sees_it, str(tmp_path))
    assert first == second
    assert "rank 1 (host " in first
    assert "copy the checkpoint to the same path on each host" in first


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def save_on_full_disk(name: str, folder: str) -> tuple[str, list[str]]:
    """Saves while there is room, and again when there is less than a checkpoint takes."""
    trainer = trained(name)
    trainer.save_checkpoint(f"{folder}/some.ckpt")
    if trainer.is_global_zero:
        Path(folder, "filler").write_bytes(bytes(shutil.disk_usage(folder).free - 8192))
    trainer.strategy.barrier()
    return failed_save(trainer, folder)


def failed_save(trainer: L.Trainer, folder: str) -> tuple[str, list[str]]:
    with pytest.raises(OSError, match="was not saved") as caught:
        trainer.save_checkpoint(f"{folder}/some.ckpt")
    trainer.strategy.barrier()  # the first rank tidies up
    return str(caught.value), sorted(os.listdir(folder))


@pytest.mark.some("pipeline", "ddp")
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_full_disk_keeps_the_checkpoint_before(
    workers: WorkerPool, small_disk: Path, name: str
) -> None:
    ranks = workers.run(2, save_on_full_disk, name, str(small_disk))
    for text, left in ranks:
        assert text == ranks[0][0]
        assert f"{small_disk}/some.ckpt was not saved" in text
        assert re.search(rf"[\d,]+ bytes were free in {small_disk}\.", text)
        assert "The checkpoint before is as it was." in text
        assert left == ["filler", "some.ckpt"]
    loaded = load_full(small_disk / "some.ckpt")
    assert loaded["state_dict"].keys() == make_module(Named, depth=2).state_dict().keys()


def save_where_one_rank_cannot(name: str, folder: str, rank: int) -> tuple[str, list[str]]:
    """Saves where a rank may write no file that is longer than a page."""
    trainer = trained(name)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if trainer.global_rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        return failed_save(trainer, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.some("ddp-0", "pipeline-1")
@pytest.mark.parametrize(
    ("name", "rank"),
    [("pipeline", 0), ("pipeline", 1), ("fsdp", 1), ("pipeline, one file", 0), ("ddp", 0)],
)
def test_what_one_rank_cannot_write_all_ranks_raise(
    workers: WorkerPool, tmp_path: Path, name: str, rank: int
) -> None:
    ranks = workers.run(2, save_where_one_rank_cannot, name, str(tmp_path), rank)
    for text, left in ranks:
        assert text == ranks[0][0]
        assert f"(Rank {rank}, host {os.uname().nodename}.)" in text
        assert left == []


class Unpicklable(Named):
    """Has what no file can hold in its checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = lambda: None


def save_unpicklable(name: str, folder: str) -> tuple[str, list[str]]:
    trainer = make_trainer(strategy=STRATEGIES[name](), devices=2)
    trainer.fit(make_module(Unpicklable, depth=2), make_loader(8), make_loader(8))
    with pytest.raises(RuntimeError, match="was not saved") as caught:
        trainer.save_checkpoint(f"{folder}/some.ckpt")
    trainer.strategy.barrier()
    return str(caught.value), os.listdir(folder)


@pytest.mark.some("pipeline")
@pytest.mark.parametrize("name", ["pipeline", "ddp"])
def test_what_cannot_be_pickled_leaves_nothing(
    workers: WorkerPool, tmp_path: Path, name: str
) -> None:
    first, second = workers.run(2, save_unpicklable, name, str(tmp_path))
    assert first == second
    assert "lambda" in first[0]
    assert first[1] == []
