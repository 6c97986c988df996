"""A process that is killed while it saves leaves a whole checkpoint, the old or the new one."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dist import DDPStrategy
from lightning_dist.checkpoint import load_full, save_full, save_sharded
from lightning_dist.engine.checkpoint import directory
from lightning_dist.strategies.base.saving.whole_file import WholeFileIO
from tests.helpers.networks.models import make_loader, make_module, make_trainer
from tests.helpers.processes.workers import CONTEXT

EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")
NAME = "last.ckpt"


def save(form: str, folder: Path, value: float) -> None:
    checkpoint = {"state_dict": {"a": torch.full((2,), value)}, "value": value}
    if form == "file":
        save_full(checkpoint, folder / NAME)
    else:
        save_sharded(checkpoint, folder / NAME, None)


def without_exchange() -> None:
    """Makes this process's file systems as those that cannot exchange names."""
    directory.exchange = lambda *_: False  # type: ignore[assignment]


def die_at(folder: Path, is_time: Callable[[str, tuple[Any, ...]], bool]) -> None:
    """Kills this process before it does something with the files of a folder."""

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        about_folder = event in EVENTS and str(arguments[0]).startswith(str(folder))
        if about_folder and is_time(event, arguments):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def save_and_die(form: str, folder: Path, exchanges: bool, point: int) -> None:
    numbers = count()
    if not exchanges:
        without_exchange()
    die_at(folder, lambda *_: next(numbers) == point)
    save(form, folder, 2.0)


def remove_and_die(folder: Path, point: int) -> None:
    numbers = count()
    die_at(folder, lambda *_: next(numbers) == point)
    WholeFileIO().remove_checkpoint(folder / NAME)


def exit_code_of(case: Callable[..., None], *arguments: Any) -> int:
    process = CONTEXT.Process(target=case, args=arguments)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.some("directory-exchange", "file-no exchange")
@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "no exchange"])
@pytest.mark.parametrize("form", ["directory", "file"])
def test_a_whole_checkpoint_survives_at_every_point(
    tmp_path: Path, form: str, exchanges: bool
) -> None:
    found = []
    keeps_name = form == "file" or (exchanges and sys.platform == "linux")
    for point in count():
        folder = tmp_path / str(point)
        folder.mkdir()
        save(form, folder, 1.0)
        code = exit_code_of(save_and_die, form, folder, exchanges, point)
        assert (folder / NAME).exists() or not keeps_name
        loaded = load_full(folder / NAME)
        found.append(loaded["value"])
        assert torch.equal(loaded["state_dict"]["a"], torch.full((2,), loaded["value"]))
        save(form, folder, 3.0)
        assert load_full(folder / NAME)["value"] == 3.0
        assert [p.name for p in folder.iterdir()] == [NAME]
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert found == sorted(found)
    assert set(found) == {1.0, 2.0}
    assert len(found) > {"directory": 12, "file": 3}[form]


@pytest.mark.parametrize("form", ["directory", "file"])
def test_no_half_of_a_checkpoint_survives_its_removal(tmp_path: Path, form: str) -> None:
    found = []
    for point in count():
        folder = tmp_path / str(point)
        folder.mkdir()
        save(form, folder, 1.0)
        code = exit_code_of(remove_and_die, folder, point)
        found.append((folder / NAME).exists())
        if found[-1]:
            assert load_full(folder / NAME)["value"] == 1.0
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert found[0]
    assert not found[-1]
    assert list(folder.iterdir()) == []


def train(folder: Path, epochs: int, save: dict[str, Any], **strategy: Any) -> int:
    """Trains from the last checkpoint, if there shall be one; returns its first epoch."""
    module = make_module(depth=1)
    begun: list[int] = []
    module.on_train_epoch_start = lambda: begun.append(trainer.current_epoch)
    trainer = make_trainer(
        strategy=DDPStrategy(**{"save_full": False, **strategy}),
        devices=1,
        max_epochs=epochs,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, "{epoch}", **save)],
    )
    resume = "last" if epochs > 1 else None
    trainer.fit(module, make_loader(8), make_loader(8), ckpt_path=resume, weights_only=True)
    return begun[0]


def train_and_die(
    folder: Path, epochs: int, save: dict[str, Any], death: tuple[str, str], **strategy: Any
) -> None:
    """Trains, and dies before it does something with a file that has such a name."""
    without_exchange()
    die_at(folder, lambda event, names: event == death[0] and names[0].endswith(death[1]))
    train(folder, epochs, save, **strategy)


def test_the_last_checkpoint_is_found_between_two_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    save = {"save_last": True, "save_top_k": 0}
    assert train(tmp_path, 1, save) == 0
    assert [p.name for p in tmp_path.iterdir()] == [NAME]
    death = ("os.rename", ".saving")
    assert exit_code_of(train_and_die, tmp_path, 2, save, death) == -signal.SIGKILL
    assert {p.name for p in tmp_path.iterdir()} == {".last.ckpt.saving", "last.replaced.ckpt"}
    assert train(tmp_path, 3, save) == 1
    assert [p.name for p in tmp_path.iterdir()] == [NAME]


FORMS = {
    "directory": {},
    "directory, by a thread": {"async_save": True},
    "file": {"save_full": True},
}


@pytest.mark.some("directory, by a thread")
@pytest.mark.parametrize("form", FORMS)
def test_a_link_to_the_last_checkpoint_leads_to_one_while_the_older_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    save, form_of = {"save_last": "link"}, partial(train, **FORMS[form])
    assert form_of(tmp_path, 1, save) == 0
    assert (tmp_path / NAME).readlink() == Path("epoch=0.ckpt")
    death = ("os.remove" if form == "file" else "os.rmdir", ".epoch=0.ckpt.saving")
    die = partial(train_and_die, **FORMS[form])
    assert exit_code_of(die, tmp_path, 2, save, death) == -signal.SIGKILL
    assert load_full(tmp_path / NAME)["epoch"] == 1
    assert form_of(tmp_path, 3, save) == 2


def test_file_systems_of_this_machine_exchange_names(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("renameat2 is Linux's")
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.write_text("file")
    assert directory.exchange(one, other)
    assert one.read_text() == "file"
    assert other.is_dir()
    assert not directory.exchange(one, tmp_path / "missing")


def test_a_directory_takes_the_place_of_a_link(tmp_path: Path) -> None:
    save("directory", tmp_path, 1.0)
    (tmp_path / NAME).rename(tmp_path / "best.ckpt")
    (tmp_path / NAME).symlink_to(tmp_path / "best.ckpt")
    save("directory", tmp_path, 2.0)
    assert load_full(tmp_path / NAME)["value"] == 2.0
    assert load_full(tmp_path / "best.ckpt")["value"] == 1.0
    assert {p.name for p in tmp_path.iterdir()} == {NAME, "best.ckpt"}


@pytest.mark.parametrize("exchange", [partial(lambda *_: False), directory.exchange])
def test_a_form_takes_the_place_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: Callable[..., bool]
) -> None:
    monkeypatch.setattr(directory, "exchange", exchange)
    for form, value in (("file", 1.0), ("directory", 2.0), ("file", 3.0)):
        save(form, tmp_path, value)
        assert load_full(tmp_path / NAME)["value"] == value
        assert [p.name for p in tmp_path.iterdir()] == [NAME]
    shutil.rmtree(tmp_path)
