"""A failed run is killed only after it has had the time to end by itself."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from lightning_dist.strategies.base.ending.signal_handlers import SIGTERM_EXIT_CODE
from lightning_dist.strategies.base.launcher import ChildProcessObserver

PATIENCE_SECONDS = 0.3


def process(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", code])


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChildProcessObserver, "patience_seconds", PATIENCE_SECONDS)


@pytest.fixture
def stuck() -> Iterator[subprocess.Popen[bytes]]:
    with process("import time; time.sleep(60)") as started:
        yield started
        started.kill()


def test_what_is_stuck_is_killed_after_the_patience(stuck: subprocess.Popen[bytes]) -> None:
    with process("raise SystemExit(3)") as failed:
        failed.wait()
        observer = ChildProcessObserver(stuck.pid, [failed], 1)
        begin = time.monotonic()
        observer.start()
        assert stuck.wait(10) == -signal.SIGKILL
    assert time.monotonic() - begin > PATIENCE_SECONDS


@pytest.mark.some("0")
@pytest.mark.parametrize("code", [0, SIGTERM_EXIT_CODE])
def test_nobody_is_killed_when_all_have_ended_well(
    stuck: subprocess.Popen[bytes], code: int
) -> None:
    with process(f"raise SystemExit({code})") as ended:
        ended.wait()
        observer = ChildProcessObserver(stuck.pid, [ended], 1)
        observer.start()
        observer.join(10)
    assert not observer.is_alive()
    assert stuck.poll() is None
