"""Runs of lessons in the time that other tests leave the cores idle: a fifth, on two cores."""

from __future__ import annotations

import shutil
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbformat import NotebookNode

from tests.helpers.notebooks import FOLDER, execute, own_environment


class LessonRuns:
    """Runs lessons one after the other, and two at a time when somebody waits for them."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._runs: dict[Path, Future[NotebookNode]] = {path: Future() for path in paths}
        self._left = deque(self._runs)
        self._environment = own_environment()  # now, for tests change it for a while
        self._scratch = TemporaryDirectory(ignore_cleanup_errors=True)
        self._threads: list[threading.Thread] = []
        self._start()

    def outcome(self, path: Path) -> NotebookNode:
        """Waits for a lesson; most of the time each is one process, or waits itself."""
        if len(self._threads) < 2:
            self._start()
        return self._runs[path].result()

    def close(self) -> None:
        """Begins no further lesson; a kernel that still runs ends with this process."""
        self._left.clear()
        self._scratch.cleanup()

    def _start(self) -> None:
        self._threads.append(threading.Thread(target=self._work, daemon=True))
        self._threads[-1].start()

    def _work(self) -> None:
        while self._left:
            try:
                path = self._left.popleft()
            except IndexError:  # the other thread has taken the last one
                return
            try:
                self._runs[path].set_result(self._run(path))
            except BaseException as error:
                self._runs[path].set_exception(error)

    def _run(self, path: Path) -> NotebookNode:
        scratch = Path(self._scratch.name, path.stem)
        folder = scratch / FOLDER.name
        shutil.copytree(FOLDER, folder)
        notebook = nbformat.read(folder / path.name, as_version=4)
        places = {"IPYTHONDIR": f"{scratch}/i", "JUPYTER_RUNTIME_DIR": f"{scratch}/j"}
        execute(notebook, folder, {**self._environment, **places}, steps_back=True)
        return notebook
