"""Runs of a script in processes that are forked from a warm interpreter.

Either as ranks that find their place in their environment, as under torchrun, but with nobody who
ends the others when one dies; or as a script that launches the other ranks itself.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.processes.workers import free_port

STARTUP_SECONDS = 60.0
# How long a run may take to end, from the moment when its trouble began.
END_SECONDS = 10.0
END_AFTER_KILL_SECONDS = 30.0

FIT = "tests.helpers.processes.fit_script"
LEAVE = "tests.helpers.processes.leave_script"
ORPHAN = "tests.helpers.processes.orphan_script"


def errors_in(output: str) -> list[str]:
    """Lists the exceptions that were printed, in their order."""
    return re.findall(r"^(?:\[rank\d\]: )?(\w*(?:\.\w+)*(?:Error|Exception)): .*", output, re.M)


def group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


class WarmPython:
    """The other end of :mod:`tests.helpers.processes.warm_python`.

    Args:
        modules: What else to import.
        command: A command that runs another one, which this interpreter's is appended to.
    """

    def __init__(self, modules: Sequence[str] = (), command: Sequence[str] = ()) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE")}
        self._process = subprocess.Popen(
            [*command, sys.executable, "-m", "tests.helpers.processes.warm_python", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=environment,
        )
        self._turn = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, what: str, about: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._turn:
            self._process.stdin.write(json.dumps([what, about]).encode() + b"\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()

    @contextmanager
    def ranks(
        self, folder: Path, *arguments: str, devices: int = 2, script: str = FIT
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
            run.start(script, arguments, environment)
        try:
            yield run
        finally:
            for rank, code in enumerate(run.exit_codes()):
                if code is None:
                    run.send(signal.SIGKILL, rank)
            run.wait(5)

    @contextmanager
    def launcher(self, folder: Path, *arguments: str) -> Iterator[ForkedRun]:
        """Starts a script that launches the other ranks; nothing of its process group is left."""
        run = ForkedRun(self, folder / "output", leads_group=True)
        group = run.start(FIT, arguments, {})
        try:
            yield run
        finally:
            if group_exists(group):
                os.killpg(group, signal.SIGKILL)
            run.wait(5)

    @contextmanager
    def trouble(self, folder: Path, *arguments: str, devices: int = 2) -> Iterator[ForkedRun]:
        """Starts ranks and waits until the trouble begins that the arguments ask for."""
        with self.ranks(folder, *arguments, *_mark(folder), devices=devices) as run:
            run.wait_for(_mark(folder)[1])
            yield run

    @contextmanager
    def training(self, folder: Path, *arguments: str, devices: int = 2) -> Iterator[ForkedRun]:
        """Starts ranks and waits until all are in the middle of their training."""
        with self.ranks(folder, *_long_fit(folder), *arguments, devices=devices) as run:
            run.wait_for(*(f"{folder}/report.{rank}" for rank in range(devices)))
            yield run

    @contextmanager
    def troubled_launcher(self, folder: Path, *arguments: str) -> Iterator[ForkedRun]:
        """Starts a launcher and waits until the trouble begins."""
        with self.launcher(folder, *arguments, *_mark(folder)) as run:
            run.wait_for(_mark(folder)[1])
            yield run

    @contextmanager
    def training_launcher(self, folder: Path, *arguments: str) -> Iterator[ForkedRun]:
        """Starts a launcher and waits until both ranks are in the middle of their training."""
        with self.launcher(folder, *_long_fit(folder), *arguments) as run:
            run.wait_for(f"{folder}/report.0", f"{folder}/report.1")
            yield run


def _mark(folder: Path) -> tuple[str, str]:
    return "--mark", str(folder / "trouble")


def _long_fit(folder: Path) -> tuple[str, ...]:
    return "--report", str(folder / "report"), "--epochs", "200"


@dataclass
class ForkedRun:
    """Processes that are running, or have run.

    Attributes:
        python: Who forks them.
        path: The file with what they print.
        leads_group: Whether they start others, in process groups that are theirs.
        pids: Their process IDs.
    """

    python: WarmPython
    path: Path
    leads_group: bool = False
    pids: list[int] = field(default_factory=list)
    _codes: dict[int, int] = field(default_factory=dict)

    @property
    def output(self) -> str:
        """What all processes have printed so far."""
        return self.path.read_text() if self.path.exists() else ""

    def start(self, script: str, arguments: Sequence[str], environment: dict[str, str]) -> int:
        """Forks one process more, and gives its ID."""
        request = {
            "script": script,
            "arguments": arguments,
            "environment": environment,
            "output": str(self.path),
            "leads_group": self.leads_group,
        }
        self.pids.append(self.python.ask("start", request))
        return self.pids[-1]

    def exit_codes(self) -> list[int | None]:
        """Gives each process's exit code, the negative signal that killed it, or None."""
        for pid in self.pids:
            if pid not in self._codes:
                code = self.python.ask("poll", pid)
                if code is not None:
                    self._codes[pid] = code
        return [self._codes.get(pid) for pid in self.pids]

    def send(self, number: signal.Signals, rank: int) -> None:
        os.kill(self.pids[rank], number)

    def wait(self, seconds: float) -> list[int]:
        """Waits until all processes have ended, those that they have started too."""
        deadline = time.monotonic() + seconds
        while None in (codes := self.exit_codes()) or self._has_left_something():
            assert time.monotonic() < deadline, f"{codes} after {seconds} s:\n{self.output}"
            time.sleep(0.02)
        return [code for code in codes if code is not None]

    def _has_left_something(self) -> bool:
        return self.leads_group and any(group_exists(pid) for pid in self.pids)

    def wait_for(self, *paths: str) -> None:
        """Waits until files are there, in which processes say how far they are."""
        deadline = time.monotonic() + STARTUP_SECONDS
        while not all(os.path.exists(path) for path in paths):
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)

    def wait_for_output(self, text: str) -> None:
        """Waits until a process prints something."""
        deadline = time.monotonic() + STARTUP_SECONDS
        while text not in self.output:
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)
