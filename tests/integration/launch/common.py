"""The recipe that each launcher runs, and the checks that it has run as one."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.helpers.processes.workers import WorkerPool
from tests.integration.test_recipes import run_in_pool

ROOT = Path(__file__).parents[3]
LAUNCH = ROOT / "recipes" / "launch"
TIMEOUT_SECONDS = 240.0


def words(folder: Path, config: str = "gpt_1f1b") -> list[str]:
    """Returns the recipe's command line behind ``fit``."""
    return [
        f"--config=recipes/configs/{config}.yaml",
        f"--config={LAUNCH / 'tiny.yaml'}",
        f"--trainer.logger.init_args.save_dir={folder}",
    ]


def environment(**variables: str) -> dict[str, str]:
    """Returns an environment in which nothing has been launched, and ``python`` is this one."""
    unset = {"WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    own = {name: value for name, value in os.environ.items() if name not in unset}
    path = f"{Path(sys.executable).parent}:{own['PATH']}"
    return {**own, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}


def launch(*commands: Sequence[str | Path], **variables: str) -> list[str]:
    """Runs commands beside each other, from the clone's root; gives what each has printed."""
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in commands
    ]
    try:
        printed = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), printed
    return printed


def metrics_in(folder: Path, name: str = "gpt_1f1b") -> dict[str, float]:
    """Returns the last value of each logged metric."""
    found: dict[str, float] = {}
    with (folder / name / "version_0" / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            found |= {key: float(value) for key, value in row.items() if value}
    return found


def assert_trained(
    workers: WorkerPool,
    printed: Sequence[str],
    folder: Path,
    config: str = "gpt_1f1b",
    *,
    processes: int = 2,
) -> None:
    """Checks that the launched processes were one run, which has trained as another does."""
    assert "".join(printed).count("Run summary") == 1, printed
    expected = folder / "expected"
    workers.run(processes, run_in_pool, ["fit", *words(expected, config)])
    assert _learned(metrics_in(folder, config)) == pytest.approx(
        _learned(metrics_in(expected, config)), rel=1e-5
    )


def _learned(metrics: Mapping[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if key in ("train_loss", "val_loss")}
