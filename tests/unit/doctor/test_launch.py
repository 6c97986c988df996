from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L
import pytest

from lightning_dist.doctor.launch import (
    LauncherFacts,
    find_environment,
    judge_launcher,
    read_launch,
)
from lightning_dist.doctor.result import Status
from tests.unit.doctor.facts import LAUNCH

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29400",
}
SLURM = {
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "71234",
    "SLURM_NODELIST": "n[3-4]",
    "SLURM_JOB_NAME": "train",
}
BY_HAND = {"MASTER_ADDR": "a", "MASTER_PORT": "1234", "LOCAL_RANK": "1", "NODE_RANK": "1"}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *SLURM, *BY_HAND, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("variables", "launcher", "place"),
    [
        (TORCHRUN, "torchrun", (3, 4, 1, 2, "a", 29400, False)),
        (TORCHRUN | SLURM, "torchrun", (3, 4, 1, 2, "a", 29400, False)),
        (SLURM, "srun", (2, 4, 0, 2, "n3", 16234, True)),
        (
            BY_HAND | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            "another launcher",
            (3, 4, 1, 2, "a", 1234, True),
        ),
        (
            BY_HAND | {"WORLD_SIZE": "4", "RANK": "3"},
            "another launcher",
            (3, 4, 1, 0, "a", 1234, True),
        ),
        ({"MASTER_PORT": "7"}, "Lightning itself", (0, 1, 0, 0, "127.0.0.1", 7, True)),
    ],
)
def test_the_launch_is_read_as_lightning_reads_it(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], launcher: str, place: Any
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment, found, reason = find_environment()
    assert found == launcher
    launch = read_launch(environment, found, reason)
    assert place == (
        launch.rank,
        launch.world_size,
        launch.local_rank,
        launch.ranks_per_host,
        launch.address,
        launch.port,
        launch.serves,
    )
    # Lightning's own choice is private to the Trainer.
    connector = L.Trainer(
        accelerator="cpu", devices=2, num_nodes=2, logger=False
    )._accelerator_connector
    assert type(connector.cluster_environment) is type(environment)


def test_missing_and_impossible_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "stale")
    with pytest.raises(ValueError, match="LOCAL_RANK of torchrun is not set"):
        read_launch(*find_environment())
    for name, value in (TORCHRUN | {"RANK": "4"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="rank 4 of 4, and 1 of 2 on its host, cannot be"):
        read_launch(*find_environment())


def test_a_launcher_that_lightning_does_not_see_is_a_failure() -> None:
    alone = replace(LAUNCH, is_detected=False, world_size=1)
    facts = LauncherFacts(sizes=(("OMPI_COMM_WORLD_SIZE", 4),), has_mpi4py=False, has_srun=False)
    result = judge_launcher(alone, facts)
    assert result.status is Status.FAIL
    assert "OMPI_COMM_WORLD_SIZE=4" in result.found
    assert "mpi4py" in result.remedy
    # Under torchrun in a SLURM job the sizes differ, and should.
    assert judge_launcher(LAUNCH, facts).status is Status.OK


def test_what_could_capture_a_launch_is_a_warning() -> None:
    alone = replace(LAUNCH, is_detected=False, world_size=1)
    assert judge_launcher(alone, LauncherFacts((), False, False)).status is Status.OK
    for facts, word in (
        (LauncherFacts((), True, False), "mpi4py"),
        (LauncherFacts((), False, True), "srun"),
    ):
        result = judge_launcher(alone, facts)
        assert (result.status, word in result.found) == (Status.WARN, True)
        assert judge_launcher(LAUNCH, facts).status is Status.OK
