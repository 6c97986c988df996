"""What cannot be removed stays alone, and hides neither a save's error nor its success."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_dist.engine.checkpoint.directory import NotSavedError, temporary_name
from lightning_dist.engine.checkpoint.files import load_full, save_full, save_sharded
from lightning_dist.engine.checkpoint.places import Draft

Save = Callable[[dict[str, Any], Path], None]
SAVES = [
    pytest.param(save_full, id="file"),
    pytest.param(partial(save_sharded, group=None), id="shards"),
]
NAMES = ("one", "two", "three", "four", "five")


def checkpoint(epoch: int) -> dict[str, Any]:
    return {"epoch": epoch, "state_dict": {"weight": torch.ones(2)}}


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Keeps files of a name from being removed, as a network's disk does of files in use."""

    def hold(name: str) -> None:
        unlink = os.unlink

        def refuse(path: Any, **options: Any) -> None:
            if os.path.basename(path) == name:
                raise OSError(16, "Device or resource busy", name)
            unlink(path, **options)

        monkeypatch.setattr(os, "unlink", refuse)

    return hold


@pytest.mark.parametrize("held", NAMES)  # one of them is the first that is to be removed
def test_of_a_failed_save_only_that_stays_which_must(
    tmp_path: Path, hold: Callable[[str], None], held: str
) -> None:
    folder = tmp_path / "some"
    folder.mkdir()
    for name in NAMES:
        (folder / name).touch()
    hold(held)
    Draft(folder).discard()
    assert os.listdir(folder) == [held]


def test_at_a_url_too(monkeypatch: pytest.MonkeyPatch) -> None:
    files = fsspec.filesystem("memory")
    remove = type(files).rm_file
    draft = Draft("memory://bucket/some.ckpt/shards-1")
    for name in NAMES:
        draft.make_marked(name)

    def refuse(self: Any, path: str) -> None:
        if path.endswith("/three"):
            raise PermissionError(path)
        remove(self, path)

    def stop_at_once(self: Any, path: str, *, recursive: bool) -> None:
        self.rm_file(f"{path}/three")

    monkeypatch.setattr(type(files), "rm_file", refuse)
    monkeypatch.setattr(type(files), "rm", stop_at_once)
    draft.discard()
    assert [name for name in NAMES if draft.has(name)] == ["three"]
    files.store.clear()


def test_a_save_whose_predecessor_cannot_be_removed_is_a_save(
    tmp_path: Path, hold: Callable[[str], None]
) -> None:
    path = tmp_path / "some.ckpt"
    save_sharded(checkpoint(1), path, None)
    hold("README.txt")
    with pytest.warns(UserWarning, match=r"some.ckpt was saved, but the checkpoint before .*busy"):
        save_sharded(checkpoint(2), path, None)
    assert load_full(path)["epoch"] == 2
    assert os.listdir(temporary_name(path)) == ["README.txt"]


def test_one_file_takes_the_place_of_a_killed_save_of_shards(tmp_path: Path) -> None:
    path = tmp_path / "some.ckpt"
    temporary_name(path).mkdir()
    (temporary_name(path) / "__0_0.distcp").touch()
    save_full(checkpoint(1), path)
    assert load_full(path)["epoch"] == 1
    assert os.listdir(tmp_path) == ["some.ckpt"]


@pytest.mark.parametrize(("owner", "name"), [(shutil, "disk_usage"), (Path, "is_dir")])
def test_a_disk_that_is_gone_does_not_hide_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    def gone(path: Path) -> None:
        raise OSError(116, "Stale file handle")

    def full(*_: Any) -> None:
        monkeypatch.setattr(owner, name, gone)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(NotSavedError, match="not saved: OSError: .* No space left on device.$"):
        save_full(checkpoint(1), tmp_path / "some.ckpt")


@pytest.mark.parametrize("name", ["precious.txt", "model.safetensors"])
@pytest.mark.parametrize("save", SAVES)
def test_a_directory_of_other_files_is_never_replaced(
    tmp_path: Path, save: Save, name: str
) -> None:
    target = tmp_path / "runs"
    target.mkdir()
    save(checkpoint(1), target)  # an empty one may go
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    target.mkdir()
    (target / name).touch()
    with pytest.raises(NotSavedError, match=rf"runs is a dir.*has '{name}'.*runs/last.ckpt"):
        save(checkpoint(2), target)
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", name]


@pytest.mark.parametrize("save", SAVES)
def test_a_disk_that_takes_no_more_is_the_file_systems_error(tmp_path: Path, save: Save) -> None:
    big = {"epoch": 1, "state_dict": {"weight": torch.ones(10_000)}}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(NotSavedError, match="not saved: OSError: .* File too large"):
            save(big, tmp_path / "some.ckpt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("save", SAVES)
def test_the_longest_name_of_a_file_system_can_be_saved_twice(tmp_path: Path, save: Save) -> None:
    path = tmp_path / f"{'n' * 250}.ckpt"
    for epoch in (1, 2):
        save(checkpoint(epoch), path)
        assert load_full(path)["epoch"] == epoch
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_that_is_not_the_disks_stays_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", fail)
    with pytest.raises(RuntimeError, match="some.ckpt was not saved: RuntimeError: out of memory"):
        save_sharded(checkpoint(1), tmp_path / "some.ckpt", None)
    assert not list(tmp_path.iterdir())
