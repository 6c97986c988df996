"""Runs of the training script on ranks that are forked from a warm interpreter.

As under torchrun each rank finds its place in its environment, but here nobody ends the others when
one dies. What depends on Lightning's launcher is tested with :mod:`tests.helpers.script_runs`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.workers import free_port

STARTUP_SECONDS = 60.0
# How long a run may take to end, from the moment when its trouble began.
END_SECONDS = 10.0
END_AFTER_KILL_SECONDS = 30.0


class WarmPython:
    """The other end of :mod:`tests.helpers.warm_python`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.warm_python"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def ask(self, what: str, about: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, about]).encode() + b"\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()

    @contextmanager
    def ranks(
        self, folder: Path, *arguments: str, devices: int = 2, script: str = "fit_script"
    ) -> Iterator[ForkedRun]:
        """Starts a script on some ranks; none is left behind."""
        run = ForkedRun(self, folder / "output")
        port = str(free_port())
        for rank in range(devices):
            environment = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "WORLD_SIZE": str(devices),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "NODE_RANK": "0",
            }
            request = {
                "script": script,
                "arguments": arguments,
                "environment": environment,
                "output": str(run.path),
            }
            run.pids.append(self.ask("start", request))
        try:
            yield run
        finally:
            for rank, code in enumerate(run.exit_codes()):
                if code is None:
                    run.send(signal.SIGKILL, rank)
            run.wait(5)

    @contextmanager
    def trouble(self, folder: Path, *arguments: str, devices: int = 2) -> Iterator[ForkedRun]:
        """Starts ranks and waits until the trouble begins that the arguments ask for."""
        mark = folder / "trouble"
        with self.ranks(folder, *arguments, "--mark", str(mark), devices=devices) as run:
            deadline = time.monotonic() + STARTUP_SECONDS
            while not mark.exists():
                assert time.monotonic() < deadline, run.output
                time.sleep(0.02)
            yield run

    @contextmanager
    def training(self, folder: Path, *arguments: str, devices: int = 2) -> Iterator[ForkedRun]:
        """Starts ranks and waits until all are in the middle of their training."""
        report = folder / "report"
        words = ("--report", str(report), "--epochs", "200", *arguments)
        with self.ranks(folder, *words, devices=devices) as run:
            deadline = time.monotonic() + STARTUP_SECONDS
            while len(list(folder.glob("report.*"))) < len(run.pids):
                assert run.exit_codes() == [None] * len(run.pids), run.output
                assert time.monotonic() < deadline, run.output
                time.sleep(0.02)
            yield run


@dataclass
class ForkedRun:
    """Ranks that are running, or have run."""

    python: WarmPython
    path: Path
    pids: list[int] = field(default_factory=list)
    _codes: dict[int, int] = field(default_factory=dict)

    @property
    def output(self) -> str:
        """What all ranks have printed so far."""
        return self.path.read_text() if self.path.exists() else ""

    def exit_codes(self) -> list[int | None]:
        """Gives each rank's exit code, the negative signal that killed it, or None."""
        for pid in self.pids:
            if pid not in self._codes:
                code = self.python.ask("poll", pid)
                if code is not None:
                    self._codes[pid] = code
        return [self._codes.get(pid) for pid in self.pids]

    def send(self, number: signal.Signals, rank: int) -> None:
        os.kill(self.pids[rank], number)

    def wait(self, seconds: float) -> list[int]:
        """Waits until all ranks have ended."""
        deadline = time.monotonic() + seconds
        while None in (codes := self.exit_codes()):
            assert time.monotonic() < deadline, f"{codes} after {seconds} s:\n{self.output}"
            time.sleep(0.02)
        return [code for code in codes if code is not None]
