"""Which process is the launcher that a rank waits for."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from lightning_dist.engine.comms.failures import parent_watch


def ends_with(launcher: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a rank takes its launcher for lost."""
    ended = threading.Event()
    monkeypatch.setenv("LIGHTNING_DIST_LAUNCHER", launcher)
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    with parent_watch.ending_with_launcher():
        return ended.wait(0.1)


def test_a_launcher_that_is_there_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with parent_watch.known_to_children():
        launcher = os.environ["LIGHTNING_DIST_LAUNCHER"]
    assert not ends_with(launcher, monkeypatch)


def test_a_later_process_of_the_same_id_is_not_the_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ends_with(f"{os.getpid()}:1", monkeypatch)
    assert "was lost before the ranks had met" in capsys.readouterr().err


def test_a_launcher_that_has_ended_is_lost_before_its_parent_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        start = Path(f"/proc/{process.pid}/stat").read_text().split()[21]
        launcher = f"{process.pid}:{start}"
        assert not ends_with(launcher, monkeypatch)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert ends_with(launcher, monkeypatch)
