"""A campaign of many cases, which can be interrupted and go on, and a table of their results."""

from __future__ import annotations

import json
import os
import queue
import shutil
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich import box
from rich.table import Table

from tests.faults.case import PHASES, draw, draw_on_hosts
from tests.faults.execution import Place, Result
from tests.faults.on_hosts import HostsPlace
from tests.helpers.processes.forked_runs import WarmPython

MODULES = ("tests.faults.training", "torch.distributed.run")
# The disk, and shared memory of its own, in which nothing else leaves anything.
MOUNT = 'mount -t tmpfs none /dev/shm && mount -t tmpfs -o size=8m none "$0" && exec "$@"'


@contextmanager
def place(
    folder: Path, references: Path, turn: threading.Lock, kind: type[Place] = Place
) -> Iterator[Place]:
    """Prepares a folder for cases; without root there is no disk to fill."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0 and shutil.which("unshare"):
        (folder / "disk").mkdir(exist_ok=True)
        command = ["unshare", "--mount", "sh", "-c", MOUNT, str(folder / "disk")]
        python = WarmPython(MODULES, command)
        python.ask("poll", python.ask("start", _NOTHING))  # when that answers, all is mounted
        disk = Path(f"/proc/{python.pid}/root{folder}/disk")
    else:
        python, disk = WarmPython(MODULES), None
    try:
        yield kind(python, folder, disk, references, turn)
    finally:
        python.close()


class Campaign:
    """Executes the cases of a seed, several at a time.

    Args:
        folder: Takes what has become of the cases; those that are in it are not executed again.
        seed: Chooses the cases.
        report: Called with a line for each case.
        on_hosts: Whether the cases are on two hosts.
    """

    def __init__(
        self, folder: Path, seed: int, report: Callable[[str], None], *, on_hosts: bool
    ) -> None:
        self._folder = folder / f"{'hosts' if on_hosts else 'one host'}, seed {seed}"
        self._draw = draw_on_hosts if on_hosts else draw
        self._place = partial(place, kind=HostsPlace if on_hosts else Place)
        self._options = f"--seed {seed} " + "--hosts " * on_hosts
        self._seed = seed
        self._report = report
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path = self._folder / "results.jsonl"
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._shared = self._folder / "uninterrupted", threading.Lock()
        self.results: dict[int, Result] = {}
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                number, result = json.loads(line)
                self.results[number] = Result(**result)

    def run(self, numbers: list[int], jobs: int, seconds: float) -> None:
        """Executes cases until all are done or the time is over."""
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in numbers:
            if number not in self.results:
                waiting.put(number)
        end = time.monotonic() + seconds
        threads = [
            threading.Thread(target=self._work, args=(f"job {job}", waiting, end))
            for job in range(min(jobs, waiting.qsize()))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            self._is_over.set()  # by ctrl+c, say: each job completes its present case

    def repeat(self, number: int) -> Result:
        """Executes one case, whether it has been or not."""
        with self._place(self._folder / "again", *self._shared) as where:
            return where.execute(self._draw(self._seed, number), f"run {number}")

    def _work(self, name: str, waiting: queue.SimpleQueue[int], end: float) -> None:
        with self._place(self._folder / name, *self._shared) as where:
            while time.monotonic() < end and not self._is_over.is_set():
                try:
                    number = waiting.get_nowait()
                except queue.Empty:
                    return
                case = self._draw(self._seed, number)
                if case.fills_disk and where.disk is None:
                    self._report(f"{number:4d} skipped: only root can mount a small disk")
                    continue
                try:
                    result = where.execute(case, f"run {number}")
                except Exception:  # of the campaign itself, which goes on
                    result = Result(str(case), problems=[f"harness: {traceback.format_exc()}"])
                self._keep(number, result)
                if not result.problems:
                    shutil.rmtree(self._folder / name / f"run {number}")

    def _keep(self, number: int, result: Result) -> None:
        with self._lock:
            self.results[number] = result
            with self._path.open("a") as file:
                file.write(json.dumps([number, asdict(result)]) + "\n")
            self._report(line_of(number, result))
            if result.problems:
                self._report(f"     python -m tests.faults {self._options}--run {number}")


_NOTHING = {
    "script": "this",
    "arguments": [],
    "environment": {},
    "output": os.devnull,
    "leads_group": False,
}


def line_of(number: int, result: Result) -> str:
    """Describes what became of a case in a line, and a line more for each problem."""
    verdict = "FAILED" if result.problems else "ok"
    line = f"{number:4d} {verdict:6} {result.outcome:5} {result.seconds:5.1f} s  {result.case}"
    return "\n".join([line, *(f"       {problem}" for problem in result.problems)])


CHECKS = ("ends", "bound", "cause", "torn", "leaves", "resumed")


def table_of(results: dict[int, Result]) -> Table:
    """Counts, for each kind of fault and phase, the runs and those in which each check held."""
    rows: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results.values():
        if len(result.faults) == 1:
            (kind, phase), *_ = result.faults
            rows[kind, phase].append(result)
        elif result.faults:
            rows["two faults", "any"].append(result)
    header = ("fault", "phase", "runs", "ended", "went on", "longest", *CHECKS)
    table = Table(*header, box=box.MARKDOWN)
    table.title = f"{len(results)} runs, {sum(not r.faults for r in results.values())} without"
    order = [*PHASES, "any"]
    for kind, phase in sorted(rows, key=lambda row: (row[0], order.index(row[1]))):
        found = rows[kind, phase]
        held = [
            len(found) - sum(any(p.startswith(f"{check}:") for p in r.problems) for r in found)
            for check in CHECKS
        ]
        table.add_row(
            kind,
            phase,
            str(len(found)),
            str(sum(r.outcome == "ended" for r in found)),
            str(sum(r.outcome == "on" for r in found)),
            f"{max(r.seconds for r in found):.0f} s",
            *map(str, held),
        )
    return table
