from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_dist.doctor import disk
from lightning_dist.doctor.disk import DISK, check_disk, judge_space, leaves_no_directory
from lightning_dist.doctor.report import Status
from tests.unit.doctor.facts import TWO_HOSTS, make_run, with_mesh


def test_a_directory_that_all_see_is_fine(tmp_path: Path) -> None:
    run = make_run("a", root=tmp_path / "new")
    result = DISK.conclude(run, {0: DISK.attempt(run)})
    assert result.status is not Status.FAIL
    assert "all ranks see it" in result.found or "free" in result.found
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["token"]


def test_directories_that_were_missing_go_again_unless_they_are_in_use(tmp_path: Path) -> None:
    missing = tmp_path / "new" / "root"
    for left in ([], ["file"]):
        with leaves_no_directory(missing):
            check_disk(make_run("a", root=missing))
            (missing / "token").unlink()
            for name in left:
                (missing / name).touch()
        assert [path.name for path in tmp_path.rglob("*")] == (["new", "root", *left] * bool(left))
    with leaves_no_directory(missing):
        (missing / "file").unlink()
    assert missing.exists()  # it was there


@pytest.mark.parametrize("name", ["file", "file/new"])
def test_a_file_is_no_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    run = make_run("a", root=tmp_path / name)
    with leaves_no_directory(run.root):
        result = check_disk(run)
    assert result.status is Status.FAIL
    assert f"{run.root} is no directory" in result.found


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of half a megabyte."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    command = ("mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(tmp_path))
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield tmp_path
    subprocess.run(("umount", str(tmp_path)), check=True)


def test_a_full_disk_is_a_failure(small_disk: Path) -> None:
    run = make_run("a", root=small_disk)
    result = DISK.conclude(run, {0: DISK.attempt(run)})
    assert result.status is Status.FAIL
    assert "No space left on device" in result.found
    assert [path.name for path in small_disk.iterdir()] == ["token"]


def test_too_little_space_for_a_checkpoint_is_a_failure() -> None:
    assert judge_space(TWO_HOSTS, 500_000_000).status is Status.WARN
    result = judge_space(replace(TWO_HOSTS, parameters=7_000_000_000), 50_000_000_000)
    assert result.status is Status.FAIL
    assert "50 GB free; a checkpoint needs 84 GB" in result.found
    result = judge_space(replace(TWO_HOSTS, parameters=1_000_000_000), 50_000_000_000)
    assert result.status is Status.OK
    assert "4 checkpoints" in result.found


def test_a_directory_that_is_not_shared_is_a_failure_unless_one_rank_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_SEEN_SECONDS", 0.0)
    monkeypatch.setattr(disk, "_NUM_RENAMES", 1)
    second = make_run("a", "b", root=tmp_path, rank=1)
    result = check_disk(second)
    assert result.status is Status.FAIL
    assert "is not shared" in result.found
    assert "save_full=True" in result.remedy
    assert check_disk(with_mesh(second, dp_shard=2)).status is Status.FAIL
    assert check_disk(with_mesh(second, dp_replicate=2)).status is Status.WARN
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "token").touch()
    assert "not shared" not in check_disk(second).found


def test_half_a_file_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tear(source: Path, target: Path) -> None:  # as a copy does
        target.write_bytes(source.read_bytes()[:100])
        time.sleep(0.02)

    monkeypatch.setattr(os, "replace", tear)
    monkeypatch.setattr(disk, "_NUM_RENAMES", 3)
    result = check_disk(make_run("a", root=tmp_path))
    assert result.status is Status.WARN
    assert "not atomic" in result.found
