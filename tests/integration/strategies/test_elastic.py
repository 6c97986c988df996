"""A run goes on inside of an epoch on another number of ranks, with the steps that it had left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_dist.checkpoint import load_full
from tests.helpers.processes.elastic_fit import BATCH_SIZE, STRATEGIES, Ends, fit
from tests.helpers.processes.workers import WorkerPool, free_port

SAMPLES = 35  # 4 steps of two replicas, and 3 samples are left out
MANY_SAMPLES = 50 * 2 * BATCH_SIZE
PATIENCE_SECONDS = 90.0


def fit_to(strategy: str, folder: str, replicas: int | None, batch: int) -> int:
    with pytest.raises(SIGTERMException) as caught:
        fit(strategy, folder, SAMPLES, replicas, Ends(batch))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def weights_in(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = load_full(folder / "last.ckpt")["state_dict"]
    return weights


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-12), name


@pytest.mark.some("fsdp")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fewer_and_more_ranks_go_on_with_the_same_steps(
    workers: WorkerPool, tmp_path: Path, strategy: str
) -> None:
    """Of one replica the first stop is inside of a step."""
    one = 2 if strategy in ("1f1b", "mesh") else 1  # ranks of one replica
    found, whole = tmp_path / "found", tmp_path / "whole"
    assert workers.run(2 * one, fit_to, strategy, str(found), 2, 1) == [143] * 2 * one
    assert workers.run(one, fit_to, strategy, str(found), 2, 11) == [143] * one
    assert workers.run(2 * one, fit, strategy, str(found), SAMPLES, 2) == [12] * 2 * one
    assert workers.run(2 * one, fit, strategy, str(whole), SAMPLES, 2) == [12] * 2 * one
    assert_near(weights_in(found), weights_in(whole))


@contextmanager
def agent(port: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Starts an agent of torchrun with one process; neither is left behind."""
    options = {
        "nnodes": "1:2",
        "nproc-per-node": 1,
        "max-restarts": 3,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": f"localhost:{port}",
        "rdzv-id": "elastic",
        "rdzv-conf": "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=2",
        "local-addr": "localhost",
    }
    given = [f"--{name}={value}" for name, value in options.items()]
    script = ["-m", "tests.helpers.processes.elastic_fit", str(folder), str(MANY_SAMPLES)]
    own = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    started = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *given, *script],
        env={**environment, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield started
    finally:
        kill_host(started)


def kill_host(process: subprocess.Popen[bytes]) -> None:
    """Kills an agent and its process, which is in a session of its own."""
    if process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in (process.pid, *map(int, children)):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def wait_for(is_there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_there():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.long
def test_a_host_goes_and_comes_back(workers: WorkerPool, tmp_path: Path) -> None:
    folder, port = tmp_path / "found", free_port()
    folder.mkdir()
    progress = folder / "progress"

    def batches_of(world_size: int) -> int:
        lines = progress.read_text().splitlines() if progress.exists() else []
        return sum(line.startswith(f"{world_size} ") for line in lines)

    with agent(port, folder) as first:
        time.sleep(1.0)  # the first agent is to have the store
        with agent(port, folder):
            wait_for(lambda: batches_of(2) > 5)
        wait_for(lambda: batches_of(1) > 5)
        before = batches_of(2)
        with agent(port, folder) as second:
            wait_for(lambda: batches_of(2) > before)
            assert second.wait(PATIENCE_SECONDS) == 0
        assert first.wait(PATIENCE_SECONDS) == 0
    assert workers.run(2, fit, "ddp", str(tmp_path / "whole"), MANY_SAMPLES, 2) == [150] * 2
    assert_near(weights_in(folder), weights_in(tmp_path / "whole"))
