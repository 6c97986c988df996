from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import lightning as L
import pytest

from lightning_dist.doctor import launch as launches
from lightning_dist.doctor.launch import check_launcher, find_environment, read_launch
from lightning_dist.doctor.report import Status, StoppedError
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
    environment, origin = find_environment()
    assert origin.startswith(f"{launcher}, since ")
    launch = read_launch(environment, origin)
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
    with pytest.raises(StoppedError, match="torchrun, since .*, but LOCAL_RANK is not set"):
        read_launch(*find_environment())
    for name, value in (TORCHRUN | {"RANK": "4"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoppedError, match="rank 4 of 4, and 1 of 2 on its host, cannot be"):
        read_launch(*find_environment())


def test_a_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (TORCHRUN | {"WORLD_SIZE": "abc"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoppedError, match="torchrun, since .*, but WORLD_SIZE='abc' must be"):
        read_launch(*find_environment())


ALONE = replace(LAUNCH, is_detected=False, world_size=1)


def test_a_launcher_that_lightning_does_not_see_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    result = check_launcher(ALONE)
    assert result.status is Status.FAIL
    assert "OMPI_COMM_WORLD_SIZE=4" in result.found
    assert "mpi4py" in result.remedy
    # Under torchrun in a SLURM job the sizes differ, and should.
    assert check_launcher(LAUNCH).status is Status.OK


@pytest.mark.parametrize("word", ["mpi4py", "srun", "nothing"])
def test_what_could_capture_a_launch_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setattr(launches, "find_spec", lambda name: name if name == word else None)
    monkeypatch.setattr(shutil, "which", lambda name: name if name == word else None)
    result = check_launcher(ALONE)
    assert (result.status, word in result.found) == (
        (Status.OK, False) if word == "nothing" else (Status.WARN, True)
    )
    assert check_launcher(LAUNCH).status is Status.OK
