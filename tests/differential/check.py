"""Run a case under its strategy and on one device, and compare."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any, Protocol

from tests.differential.case import Case
from tests.differential.compare import differences
from tests.differential.dials.strategies import STRATEGIES
from tests.differential.machine import ON_CPU, Machine
from tests.differential.observe import files_in
from tests.differential.run import begin_on_one_device, run_rank, run_reference
from tests.helpers.processes.workers import CaseFailedError, WorkerPool

TIMEOUT_SECONDS = 60.0


class RefusedError(Exception):
    """The strategy does not take the case, and says so on each rank; or one device does not."""


class Pool(Protocol):
    """Runs a function on a number of ranks, and gives what each returned."""

    def run(
        self, world_size: int, case: Callable[..., Any], *args: Any, timeout: float
    ) -> list[Any]:
        """Runs it within some seconds."""
        ...


def find_differences(case: Case, pool: Pool, machine: Machine = ON_CPU) -> list[str]:
    """Runs a case both ways and lists what differs.

    Args:
        case: The case.
        pool: Processes for the ranks.
        machine: What both run on.

    Raises:
        RefusedError: All ranks alike refused the case, which runs on one device; or that fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Both runs are at one path, which is in checkpoints.
        run, begun, one = (Path(folder, name) for name in ("run", "begun", "one"))
        run.mkdir()
        try:
            if case.begun_by_one_device:
                begin_on_one_device(case, str(run), machine)
            copytree(run, begun, symlinks=True)
            reference = run_reference(case, str(run), machine)
        except Exception as error:
            raise RefusedError(f"one device: {type(error).__name__}: {error}") from error
        run.rename(one)
        begun.rename(run)
        try:
            ranks = pool.run(
                STRATEGIES[case.strategy].devices,
                run_rank,
                case,
                str(run),
                machine,
                timeout=TIMEOUT_SECONDS,
            )
        except CaseFailedError as error:
            return [f"the run failed: {error}"]
        refusals = {seen.refusal for seen in ranks}
        if len(refusals - {reference.refusal, None}) == len(refusals) == 1:
            raise RefusedError(refusals.pop())
        return differences(case, ranks, files_in(run), reference, files_in(one))


def check(case: Case) -> None:
    """Prints what differs, and exits with 1 if anything does.

    Args:
        case: The case.
    """
    pool = WorkerPool()
    try:
        found = find_differences(case, pool)
    finally:
        pool.close()
    print("\n".join(found) or "as on one device")
    raise SystemExit(bool(found))
