"""The pieces of ``make gpu`` on a CPU: each runs, is kept, does not run again, and is printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.gpu.records import End, Folder
from tests.gpu.runner import ROOT, run_piece
from tests.gpu.setting import Setting

PIECE = "no_sync"


def call(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu", "--device", "cpu", "--folder", str(folder)]
    return subprocess.run(
        [*command, "--only", PIECE, *options], cwd=ROOT, capture_output=True, text=True
    )


def test_a_piece_from_the_command_to_the_table(tmp_path: Path) -> None:
    first = call(tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    file = Folder(tmp_path).file_of(PIECE)
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 13
    assert {row["verdict"] for row in rows[:9]} == {"holds"}
    for row in rows:
        assert f"| {PIECE} | {row['what']} | {row['found']} |" in first.stdout
    written = file.stat().st_mtime_ns
    second = call(tmp_path)
    assert file.stat().st_mtime_ns == written
    assert f"| {PIECE} | {rows[0]['what']} |" in second.stdout


def test_a_piece_that_fails_or_takes_too_long_is_kept_as_such(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    late = run_piece(PIECE, Setting("cpu"), folder, limit_seconds=0.5)
    assert late.end is End.TIMED_OUT
    assert late.failures
    crashed = run_piece("no piece", Setting("cpu"), folder, limit_seconds=60)
    assert crashed.end is End.CRASHED
    assert "KeyError: 'no piece'" in crashed.note
    assert folder.read("no piece") == crashed
