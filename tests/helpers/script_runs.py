"""Runs of the training script in real processes, for tests in which something goes wrong."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.forked_runs import STARTUP_SECONDS


@dataclass
class Run:
    process: subprocess.Popen[str]
    output: str = ""

    def wait(self, seconds: float) -> int:
        """Waits for the whole process group; gives the main process's exit code."""
        deadline = time.monotonic() + seconds
        self.output = self.process.communicate(timeout=seconds)[0]
        while group_exists(self.process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not group_exists(self.process.pid), "a process was left behind"
        return self.process.returncode


def group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def errors_in(output: str) -> list[str]:
    """Lists the exceptions that were printed, in their order."""
    return re.findall(r"^(?:\[rank\d\]: )?(\w*(?:\.\w+)*(?:Error|Exception)): .*", output, re.M)


@contextmanager
def script(*arguments: str) -> Iterator[Run]:
    command = [sys.executable, "-m", "tests.helpers.fit_script", *arguments]
    environment = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE")}
    run = Run(
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=environment,
            # A shell that runs the tests in the background has its children ignore ctrl+c.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    )
    try:
        yield run
    finally:
        if group_exists(run.process.pid):
            os.killpg(run.process.pid, signal.SIGKILL)
        if run.process.stdout is not None and not run.process.stdout.closed:
            run.process.communicate()


@contextmanager
def troubled_script(tmp_path: Path, *arguments: str) -> Iterator[Run]:
    """A script in which the trouble begins that the arguments ask for."""
    mark = tmp_path / "trouble"
    with script(*arguments, "--mark", str(mark)) as run:
        deadline = time.monotonic() + STARTUP_SECONDS
        while not mark.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield run


@contextmanager
def training_script(tmp_path: Path, *arguments: str) -> Iterator[Run]:
    """A script that is in the middle of its training."""
    report = tmp_path / "report"
    with script("--report", str(report), "--epochs", "200", *arguments) as run:
        deadline = time.monotonic() + STARTUP_SECONDS
        while not (tmp_path / "report.1").exists():
            assert run.process.poll() is None, run.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield run
