"""A process that waits for a launcher that is lost does not wait for long."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.processes.forked_runs import ORPHAN, STARTUP_SECONDS, ForkedRun, WarmPython

PATIENCE_SECONDS = 20.0


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def child_of(run: ForkedRun, until: str) -> int:
    deadline = time.monotonic() + STARTUP_SECONDS
    while until not in run.output:
        assert time.monotonic() < deadline, run.output
        time.sleep(0.02)
    found = re.search(r"child (\d+) waits", run.output)
    assert found is not None
    return int(found[1])


@pytest.mark.some("waits")
@pytest.mark.parametrize("where", ["waits", "waits_in_another"])
def test_a_process_that_waits_ends_with_its_launcher(
    warm_python: WarmPython, tmp_path: Path, where: str
) -> None:
    with warm_python.ranks(tmp_path, where, devices=1, script=ORPHAN) as run:
        child = child_of(run, until="waits")
        time.sleep(1.0)
        assert exists(child), run.output
        run.send(signal.SIGKILL, 0)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while exists(child):
            assert time.monotonic() < deadline, run.output
            time.sleep(0.02)
    assert "was lost before the ranks had met" in run.output


def test_a_process_that_has_met_it_goes_on(warm_python: WarmPython, tmp_path: Path) -> None:
    with warm_python.ranks(tmp_path, "meets", devices=1, script=ORPHAN) as run:
        child = child_of(run, until="has met it")
        run.send(signal.SIGKILL, 0)
        time.sleep(2.0)
        assert exists(child)
        os.kill(child, signal.SIGKILL)
