"""Which pieces of ``make gpu`` run at once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.gpu import __main__ as command
from tests.gpu.records import End, Folder, Record
from tests.gpu.setting import Setting

UNTIMED, TIMED = ["parity_1", "half"], ["gpt", "speed"]


@pytest.mark.parametrize("num_jobs", [1, 2])
def test_pieces_that_measure_time_run_alone(
    num_jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: set[str] = set()
    beside: dict[str, set[str]] = {}
    meeting = threading.Barrier(2 if num_jobs == 2 else 1)

    def run_piece(name: str, *_: Any) -> Record:
        running.add(name)
        if name in UNTIMED:
            meeting.wait(5)  # breaks if they do not run at once
        beside[name] = running - {name}
        if name in UNTIMED:
            meeting.wait(5)
        running.discard(name)
        return Record(name, {}, end=End.DONE)

    monkeypatch.setattr(command, "run_piece", run_piece)
    names = ["gpt", "parity_1", "speed", "half"]
    command.run_all(
        Console(quiet=True), names, Setting("cpu"), Folder(tmp_path), 60.0, num_jobs=num_jobs
    )
    assert all(beside[name] == set() for name in TIMED)
    together = num_jobs == 2
    assert beside["half"] == ({"parity_1"} if together else set())
