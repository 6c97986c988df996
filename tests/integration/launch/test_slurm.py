"""The sbatch script with stand-ins for ``srun`` and ``scontrol``: preempted, requeued, resumed.

The stand-in of ``srun`` starts the tasks with SLURM's variables, that of ``scontrol`` ends them, as
SLURM does in a requeue. SLURM itself is not needed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.processes.workers import free_port
from tests.integration.launch.common import LAUNCH, ROOT, TIMEOUT_SECONDS, environment

JOB = "4711"
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for rank in 0 1; do
  SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NODEID=0 SLURM_NTASKS=2 "$@" &
  echo $! >> tasks
done
wait -n || exit $?  # --kill-on-bad-exit
wait
"""
SCONTROL = """#!/bin/bash
echo "$@" >> requeued
kill -TERM $(cat tasks)
"""


def run_job(folder: Path, *, preempt: bool) -> str:
    """Runs the job in a folder, where it finds what it has saved; gives what it has printed."""
    variables = environment(
        SLURM_JOB_ID=JOB,
        SLURM_JOB_NAME="recipe",
        SLURM_NNODES="1",
        SLURM_NTASKS_PER_NODE="2",
        MASTER_PORT=str(free_port()),
    )
    variables["PATH"] = f"{folder}:{variables['PATH']}"
    configs = [f"{ROOT}/recipes/configs/gpt_pipedream.yaml", f"{LAUNCH}/tiny.yaml"]
    words = [f"--config={config}" for config in configs]
    (folder / "tasks").unlink(missing_ok=True)
    with (folder / "log").open("w") as log:
        job = subprocess.Popen(
            ["bash", LAUNCH / "slurm.sbatch", *words, "--trainer.max_epochs=20"],
            cwd=folder,
            env=variables,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        if preempt:
            until_begun(folder, job)
            for task in (folder / "tasks").read_text().split():
                os.kill(int(task), signal.SIGUSR1)
        assert (job.wait(TIMEOUT_SECONDS) != 0) == preempt, (folder / "log").read_text()
    return (folder / "log").read_text()


def until_begun(folder: Path, job: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not list(folder.glob("runs/*/*/version_0/metrics.csv")):
        assert job.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
def test_a_preempted_job_goes_on(tmp_path: Path) -> None:
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    run_job(tmp_path, preempt=True)
    assert (tmp_path / "requeued").read_text() == f"requeue {JOB}\n"  # by one rank
    (saved,) = tmp_path.glob("runs/*/hpc_ckpt_*")
    printed = run_job(tmp_path, preempt=False)
    assert f"Restored all states from the checkpoint at {saved.relative_to(tmp_path)}" in printed
    assert printed.count("`max_epochs=20` reached") == 1
