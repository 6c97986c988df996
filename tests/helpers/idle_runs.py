"""Runs in the time that other tests leave the cores idle: a fifth, on two cores.

For what is a process of its own, and needs nobody's ports or timing: lessons, command lines, a peak
of memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import nbformat
from nbformat import NotebookNode

from tests.helpers.notebooks import FOLDER, STEP_BACK, execute, own_environment

SECONDS = 1200.0  # while others are busy; whoever waits has a limit of their own
_GO_ON = "import sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


class Job(Protocol):
    """Something to run; equal ones are run once."""

    def run(self, folder: Path, environment: Mapping[str, str]) -> Any:
        """Runs in an empty folder, as a process that steps back."""


@dataclass(frozen=True)
class Lesson:
    """A notebook."""

    path: Path

    def run(self, folder: Path, environment: Mapping[str, str]) -> NotebookNode:
        lessons = folder / FOLDER.name
        shutil.copytree(FOLDER, lessons)
        notebook = nbformat.read(lessons / self.path.name, as_version=4)
        places = {"IPYTHONDIR": f"{folder}/i", "JUPYTER_RUNTIME_DIR": f"{folder}/j"}
        execute(notebook, lessons, {**environment, **places}, steps_back=True)
        return notebook


@dataclass(frozen=True)
class Command:
    """Arguments of Python, which runs in the folder."""

    words: tuple[str, ...]

    def run(self, folder: Path, environment: Mapping[str, str]) -> Finished:
        policy = ("-c", f"{STEP_BACK}; {_GO_ON}") if hasattr(os, "SCHED_IDLE") else ()
        result = subprocess.run(
            [sys.executable, *policy, *self.words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            cwd=folder,
            env={**environment, "PYTHONPATH": os.getcwd()},
            check=False,
        )
        return Finished(folder, result.returncode, result.stdout)


@dataclass(frozen=True)
class Finished:
    """What came of a command: its exit code, what it printed, and the folder with its files."""

    folder: Path
    code: int
    output: str


class IdleRuns:
    """Runs jobs one after the other, and two at a time when somebody waits for them."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._runs: dict[Job, Future[Any]] = {job: Future() for job in jobs}
        self._left = deque(enumerate(self._runs))
        self._environment = own_environment()  # now, for tests change it for a while
        self._scratch = TemporaryDirectory(ignore_cleanup_errors=True)
        self._threads: list[threading.Thread] = []
        self._start()

    def outcome(self, job: Job) -> Any:
        """Waits for a job; most of the time each is one process, or waits itself."""
        if len(self._threads) < 2:
            self._start()
        return self._runs[job].result()

    def close(self) -> None:
        """Begins no further job; one that still runs ends with this process."""
        self._left.clear()
        self._scratch.cleanup()

    def _start(self) -> None:
        self._threads.append(threading.Thread(target=self._work, daemon=True))
        self._threads[-1].start()

    def _work(self) -> None:
        while self._left:
            try:
                number, job = self._left.popleft()
            except IndexError:  # the other thread has taken the last one
                return
            try:
                folder = Path(self._scratch.name, str(number))
                folder.mkdir()
                self._runs[job].set_result(job.run(folder, self._environment))
            except BaseException as error:
                self._runs[job].set_exception(error)
