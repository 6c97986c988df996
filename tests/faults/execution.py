"""Execute a case: start it, bring its faults about, watch how it ends, and resume it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from lightning_dist.checkpoint import load_full
from lightning_dist.engine.checkpoint.directory import resolve
from tests.faults.case import LAUNCHER, PARTING, SILENT, Case
from tests.faults.inject import Injector
from tests.faults.training import INEXACT, NUM_STEPS, Plan
from tests.faults.verdict import first_alarm, has_true_cause_first
from tests.helpers.processes.forked_runs import ForkedRun, WarmPython
from tests.helpers.processes.workers import free_port

START_SECONDS = 120.0
# From the last fault on: to the end of all processes, or to the end of the training.
END_SECONDS = 30.0
# An agent of torchrun's gives a process that does not end by SIGTERM this long.
TORCHRUN_SECONDS = 30.0
POLL_SECONDS = 0.05
ROOT = Path(__file__).parents[2]


@dataclass
class Result:
    """What became of a case.

    Attributes:
        case: The case, in words.
        faults: Each fault that came, with its kind and the phase in which its target was.
        outcome: Whether the run ``"ended"``, went ``"on"``, or its faults were too ``"late"``.
        seconds: From the first fault to the end of the last process.
        alarm: The first line of the output that says that something is wrong.
        problems: What is not as it must be; each begins with the name of a check.
    """

    case: str
    faults: list[tuple[str, str]] = field(default_factory=list)
    outcome: str = "ended"
    seconds: float = 0.0
    alarm: str = ""
    problems: list[str] = field(default_factory=list)


class Run(Protocol):
    """Processes that are running, or have run."""

    @property
    def output(self) -> str: ...

    def exit_codes(self) -> list[int | None]: ...


class Place:
    """Where cases are executed, one at a time.

    Args:
        python: Forks the processes.
        folder: Takes what the runs write.
        disk: A small disk that can be filled; None if there is none.
        references: Takes the uninterrupted runs.
        turn: Held by whichever place makes an uninterrupted run.
    """

    def __init__(
        self,
        python: WarmPython,
        folder: Path,
        disk: Path | None,
        references: Path,
        turn: threading.Lock,
    ) -> None:
        self.python = python
        self.folder = folder
        self.disk = disk
        self._references = references
        self._turn = turn
        self._shared_memory = set(self._list_shared_memory())

    def execute(self, case: Case, name: str) -> Result:
        """Executes a case and checks all that must hold."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "tmp").mkdir(parents=True)
        checkpoints = self._empty_disk() if case.fills_disk else folder / "checkpoints"
        result, port = Result(str(case)), free_port()
        with self._turn:
            expected = self._reference(case.strategy)
        with self._started(case, folder, checkpoints, port) as (run, injector):
            _watch(case, folder, run, injector, result)
            output, codes = run.output, run.exit_codes()
        came = [fault for fault in case.faults if fault in injector.hits]
        result.faults = [(fault.kind, injector.hits[fault][1]) for fault in came]
        result.alarm = first_alarm(output)
        has_trained = _has_trained(case, folder)
        is_orphaned = LAUNCHER in (fault.target for fault in came) and case.launcher == "torchrun"
        is_parted = any(fault.kind in PARTING for fault in came)
        if has_trained and (set(codes) == {0} or is_orphaned or is_parted):
            result.outcome = "on" if came else "late"
        elif set(codes) == {0}:
            result.problems.append("ends: as if it had been finished, with exit code 0")
        if not came and result.outcome == "ended":
            result.problems.append("ends: before any fault")
        was_too_late = has_trained and is_parted and not result.alarm  # to be seen by a rank
        if not (was_too_late or has_true_cause_first(case, came, output)):
            result.problems.append(f"cause: {result.alarm or 'nothing was printed'}")
        goes_on = {"SIGSTOP", "link cut"}.issuperset(fault.kind for fault in came)
        if goes_on and came and result.outcome != "on":
            result.problems.append("ends: would have to go on")
        result.problems += self._leftovers(folder) + _torn(checkpoints)
        if result.outcome == "ended":
            result.problems += self._resume(case, folder, checkpoints, port)
        result.problems += _differences(folder, expected, case.strategy in INEXACT)
        return result

    @contextmanager
    def _started(
        self, case: Case, folder: Path, checkpoints: Path, port: int
    ) -> Iterator[tuple[Run, Injector]]:
        """Starts a run; none of its processes is left."""
        attempt = len(list(folder.glob("plan.*")))
        pipe = folder / f"phases.{attempt}"
        run = ForkedRun(self.python, folder / f"output.{attempt}", leads_group=True)
        injector = Injector(pipe, case.faults, lambda: run.pids[0], checkpoints / "filler")
        path = write_plan(case, folder, checkpoints, pipe)
        environment = environment_of(folder)
        if case.launcher == "script":
            run.start("tests.faults.rank", [str(path)], {**environment, "MASTER_PORT": str(port)})
        else:
            options = [
                f"--nproc-per-node={case.num_ranks}",
                f"--master-port={port}",
                "--master-addr=127.0.0.1",
            ]
            script = ["-m", "tests.faults.rank", str(path)]
            start = [str(folder), str(run.path), *options, *script]
            run.start("tests.faults.agent", start, environment)
        try:
            yield run, injector
        finally:
            injector.close()
            for pid in {*processes_in(folder), *(p for p in run.pids if None in run.exit_codes())}:
                os.kill(pid, signal.SIGKILL)
            run.wait(10)

    def _resume(self, case: Case, folder: Path, checkpoints: Path, port: int) -> list[str]:
        again = replace(case, faults=(), timeout_seconds=180.0)
        for weights in folder.glob("weights.*"):
            weights.unlink()
        result = Result("")
        port = port if case.keeps_port else free_port()
        with self._started(again, folder, checkpoints, port) as (run, injector):
            _watch(again, folder, run, injector, result)
            problems, codes = result.problems, run.exit_codes()
        if set(codes) != {0}:
            problems.append(f"exit codes {codes}")
        names = [path.name for path in checkpoints.glob("*")]
        problems += [f"{name} was left" for name in names if name[0] == "." or "replaced" in name]
        return [f"resumed: {problem}" for problem in problems]

    def _reference(self, strategy: str) -> list[dict[str, torch.Tensor]]:
        """Returns each rank's final weights without faults, from a run that is made once."""
        folder = self._references / strategy
        case = Case(strategy)
        weights = [folder / f"weights.{rank}" for rank in range(case.num_ranks)]
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            (folder / "tmp").mkdir(parents=True)
            result = Result("")
            started = self._started(case, folder, folder / "checkpoints", free_port())
            with started as (run, injector):
                _watch(case, folder, run, injector, result)
                assert run.exit_codes() == [0], run.output
                assert not result.problems, result.problems
            (folder / "done").touch()
        return [torch.load(path, weights_only=True) for path in weights]

    def _empty_disk(self) -> Path:
        assert self.disk is not None
        for path in self.disk.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        return self.disk

    def _leftovers(self, folder: Path) -> list[str]:
        """Lists temporary files and shared memory that are left."""
        names = {path.name for path in (folder / "tmp").iterdir()}
        names = {name for name in names if not name.startswith("torchelastic_")}  # torchrun's logs
        names |= set(self._list_shared_memory()) - self._shared_memory
        return [f"leaves: {name}" for name in sorted(names)]

    def _list_shared_memory(self) -> list[str]:
        own = f"/proc/{self.python.pid}/root/dev/shm"
        is_everyones = os.path.samefile(own, "/dev/shm")
        return [] if is_everyones else os.listdir(own)


def write_plan(case: Case, folder: Path, checkpoints: Path, pipe: Path) -> Path:
    """Writes what the ranks of the next attempt are told; returns where."""
    plan: Plan = {
        "strategy": case.strategy,
        "num_ranks": case.num_ranks,
        "timeout_seconds": case.timeout_seconds,
        "saves": case.saves,
        "async_save": case.async_save,
        "checkpoints": str(checkpoints),
        "pipe": str(pipe),
        "weights": str(folder / "weights"),
        "raises": [(f.target, f.phase, f.time) for f in case.faults if f.kind == "raise"],
    }
    path = folder / f"plan{pipe.suffix}"
    path.write_text(json.dumps(plan))
    return path


def environment_of(folder: Path) -> dict[str, str]:
    """Returns what the processes of a run get beside the launcher's variables."""
    return {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONFAULTHANDLER": "1",
        "TMPDIR": str(folder / "tmp"),
    }


def _watch(case: Case, folder: Path, run: Run, injector: Injector, result: Result) -> None:
    """Waits for the end of all processes; says so if that takes too long."""
    begin = time.monotonic()
    while None in run.exit_codes() or processes_in(folder):
        now = time.monotonic()
        is_parted = any(fault.kind in PARTING for fault in injector.hits)
        if is_parted and _has_trained(case, folder) and not processes_in(folder):
            break  # torchrun's agents wait for each other, five minutes long
        at = [when for when, _ in injector.hits.values()]
        bound = max(at) + _bound(case) if at else begin + START_SECONDS
        if now > bound:
            result.problems.append(f"bound: not at its end after {now - min(at or [begin]):.0f} s")
            for pid in processes_in(folder):  # prints all stacks
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGABRT)
            time.sleep(1.0)
            break
        time.sleep(POLL_SECONDS)
    if injector.hits:
        result.seconds = time.monotonic() - min(when for when, _ in injector.hits.values())


def _has_trained(case: Case, folder: Path) -> bool:
    return len(list(folder.glob("weights.*"))) == case.num_ranks


def _bound(case: Case) -> float:
    """Returns how long a run may take to its end; longer where much else runs."""
    lasts = max((fault.lasts_seconds for fault in case.faults), default=0.0)
    silent = any(fault.kind in SILENT for fault in case.faults)
    patience = case.timeout_seconds + TORCHRUN_SECONDS if silent else 0.0
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return END_SECONDS * max(1.0, load / 2) + lasts + patience


def processes_in(folder: Path) -> list[int]:
    """Lists the processes whose working directory is the run's."""
    own = os.stat(folder)
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            where = os.stat(f"/proc/{name}/cwd")
        except OSError:  # it has ended, or is another user's
            continue
        if (where.st_dev, where.st_ino) == (own.st_dev, own.st_ino):
            found.append(int(name))
    return found


def _torn(checkpoints: Path) -> list[str]:
    """Lists checkpoints that cannot be read."""
    problems = []
    last = resolve(checkpoints / "last.ckpt")
    paths = {path for path in checkpoints.glob("*.ckpt") if not path.name.startswith(".")}
    for path in sorted({*paths, *([last] if last.exists() else [])}):
        try:
            step: Any = load_full(path)["global_step"]
            assert 0 < step <= NUM_STEPS
        except Exception as error:
            problems.append(f"torn: {path.name}: {type(error).__name__}: {error}")
    return problems


def _differences(folder: Path, expected: list[dict[str, torch.Tensor]], inexact: bool) -> list[str]:
    """Lists ranks whose final weights are not those of the uninterrupted run, or not there."""
    problems = []
    for rank, weights in enumerate(expected):
        path = folder / f"weights.{rank}"
        found = torch.load(path, weights_only=True) if path.exists() else {}
        equal = [
            name
            for name in weights
            if name in found and (inexact or weights[name].equal(found[name]))
        ]
        if len(equal) < len(weights):
            what = f"{len(equal)} of {len(weights)} equal" if found else "there are none"
            problems.append(f"resumed: weights of rank {rank}: {what}")
    return problems
