"""The pieces of ``make gpu`` on a CPU: each runs, is kept, does not run again, and is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.__main__ import main
from tests.gpu.records import End, Folder
from tests.gpu.runner import run_piece
from tests.gpu.setting import Setting

PIECE = "no_sync"


@pytest.mark.long
def test_a_piece_from_the_command_to_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--device", "cpu", "--folder", str(tmp_path), "--only", PIECE]
    monkeypatch.setattr("sys.argv", ["tests.gpu", *options])

    def call() -> str:
        with pytest.raises(SystemExit) as end:
            main()
        output = capsys.readouterr().out
        assert end.value.code == 0, output
        return output

    first = call()
    file = Folder(tmp_path).file_of(PIECE)
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 9
    assert {row["verdict"] for row in rows} == {"holds"}
    for row in rows:
        assert f"| {PIECE} | {row['what']} | {row['found']} |" in first
    written = file.stat().st_mtime_ns
    assert f"| {PIECE} | {rows[0]['what']} |" in call()
    assert file.stat().st_mtime_ns == written


@pytest.mark.long
def test_a_piece_that_fails_or_takes_too_long_is_kept_as_such(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    late = run_piece(PIECE, Setting("cpu"), folder, limit_seconds=0.5)
    assert late.end is End.TIMED_OUT
    assert late.failures
    crashed = run_piece("no piece", Setting("cpu"), folder, limit_seconds=200)
    assert crashed.end is End.CRASHED
    assert "KeyError: 'no piece'" in crashed.note
    assert folder.read("no piece") == crashed
