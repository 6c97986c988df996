"""Agents of torchrun on two hosts: one is lost, the other trains on, the lost one comes back."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_dist.checkpoint import load_full
from tests.helpers.hosts.cluster import Host, hosts
from tests.helpers.hosts.namespaces import HostProcess, why_no_hosts
from tests.helpers.processes.elastic_fit import BATCH_SIZE, fit
from tests.helpers.processes.workers import WorkerPool

pytestmark = [
    pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts())),
    pytest.mark.long,  # a minute, of which the agents wait most
]

SAMPLES = 50 * 2 * BATCH_SIZE
PATIENCE_SECONDS = 120.0
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Else torch's agents tell their store's address in their first round alone, and one that joins
    # a later round waits for it in vain.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def start_agent(host: Host, strategy: str, folder: Path, log: Path) -> HostProcess:
    """Starts an agent with one process."""
    options = {
        "nnodes": "1:2",
        "nproc-per-node": 1,
        "max-restarts": 3,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": "host0:29400",
        "rdzv-conf": "last_call_timeout=5",
    }
    given = [f"--{name}={value}" for name, value in options.items()]
    script = ["-m", "tests.helpers.processes.elastic_fit", strategy, str(folder), str(SAMPLES)]
    with log.open("a") as output:
        return host.popen(
            [sys.executable, "-m", "torch.distributed.run", *given, *script],
            env=ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def wait_for(is_there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_there():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(("strategy", "is_silent"), [("ddp", False), ("fsdp", True)])
def test_a_host_goes_and_comes_back(
    workers: WorkerPool, tmp_path: Path, strategy: str, is_silent: bool
) -> None:
    """All processes of the host are killed; or it loses its power, and the other waits in vain."""
    with hosts(2, shared_disk=True) as cluster:
        first, second = cluster.hosts
        folder, log = cluster.disk / "found", tmp_path / "log"
        first.path(folder).mkdir()
        progress = first.path(folder) / "progress"

        def batches_of(world_size: int) -> int:
            lines = progress.read_text().splitlines() if progress.exists() else []
            return sum(line.startswith(f"{world_size} ") for line in lines)

        agent = start_agent(first, strategy, folder, log)
        lost = start_agent(second, strategy, folder, log)
        wait_for(lambda: batches_of(2) > 5)
        if is_silent:
            second.cut()
        second.kill()
        lost.wait(PATIENCE_SECONDS)
        wait_for(lambda: batches_of(1) > 5)
        second.boot()
        before = batches_of(2)
        other = start_agent(second, strategy, folder, log)
        wait_for(lambda: batches_of(2) > before)
        assert [agent.wait(PATIENCE_SECONDS), other.wait(PATIENCE_SECONDS)] == [0, 0]
        found = load_full(first.path(folder) / "last.ckpt")["state_dict"]
    assert workers.run(2, fit, strategy, str(tmp_path / "whole"), SAMPLES, 2) == [150] * 2
    expected = load_full(tmp_path / "whole" / "last.ckpt")["state_dict"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
