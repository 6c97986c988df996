from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_dist.doctor import disk
from lightning_dist.doctor.disk import DISK, DiskFacts, judge_disk
from lightning_dist.doctor.report import Status
from tests.unit.doctor.facts import TWO_HOSTS, make_run, with_mesh

GOOD = DiskFacts(free=50_000_000_000)


def judged(run: Any = TWO_HOSTS, **other: Any) -> tuple[Status, str]:
    result = judge_disk(run, {**dict.fromkeys(range(3), GOOD), 3: replace(GOOD, **other)})
    return result.status, f"{result.found} {result.remedy}"


def test_a_directory_that_all_see_is_fine(tmp_path: Path) -> None:
    assert judged()[0] is Status.OK
    run = make_run("a", root=tmp_path / "new")
    result = DISK.conclude(run, {0: DISK.attempt(run)})
    assert result.status is not Status.FAIL
    assert "all ranks see it" in result.found or "free" in result.found
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["token"]


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
    assert judged(free=500_000_000)[0] is Status.WARN
    large = replace(TWO_HOSTS, parameters=7_000_000_000)
    status, text = judged(large)
    assert status is Status.FAIL
    assert "50 GB free; a checkpoint needs 84 GB" in text
    small = replace(TWO_HOSTS, parameters=1_000_000_000)
    assert "4 checkpoints" in judged(small)[1]


def test_a_directory_that_is_not_shared_is_a_failure_unless_one_rank_writes() -> None:
    status, text = judged(sees_first=False)
    assert status is Status.FAIL
    assert "b (rank 3) cannot see what rank 0 writes" in text
    assert "save_full=True" in text
    assert judged(with_mesh(TWO_HOSTS, dp_shard=4), sees_first=False)[0] is Status.FAIL
    assert judged(with_mesh(TWO_HOSTS, dp_replicate=4), sees_first=False)[0] is Status.WARN


def test_another_hosts_file_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_SEEN_SECONDS", 0.0)
    run = make_run("a", "b", root=tmp_path, rank=1)
    monkeypatch.setattr(disk, "_NUM_RENAMES", 1)
    assert not disk.probe_disk(run).sees_first
    (tmp_path / "token").touch()
    assert disk.probe_disk(run).sees_first


def test_half_a_file_is_a_warning() -> None:
    status, text = judged(num_torn=2)
    assert status is Status.WARN
    assert "not atomic for b (rank 3)" in text
