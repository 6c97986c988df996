"""Launches of Lightning's own variables that do not fit the Trainer."""

from __future__ import annotations

import os

import pytest
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_dist.strategies.base.launcher import STARTED, check_launch

PLACE = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def _nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*STARTED, *PLACE, "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)


def check(monkeypatch: pytest.MonkeyPatch, devices: int, nodes: int, **variables: str) -> None:
    with monkeypatch.context() as context:
        for name, value in variables.items():
            context.setenv(name, value)
        environment = LightningEnvironment()
        environment.set_world_size(devices * nodes)
        rank = environment.node_rank() * devices + environment.local_rank()
        environment.set_global_rank(rank)
        check_launch(environment, devices, nodes)


def test_a_launch_that_fits_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, 4, 1)
    check(monkeypatch, 2, 2, NODE_RANK="1", **PLACE)
    check(monkeypatch, 2, 2, NODE_RANK="1", LOCAL_RANK="1", WORLD_SIZE="4", **PLACE)
    check(monkeypatch, 1, 1, OMPI_COMM_WORLD_SIZE="4")  # runs of one process each
    assert not PLACE.keys() & os.environ.keys()


@pytest.mark.parametrize("name", STARTED)
def test_two_launchers_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=3: .*start devices=2 and num_nodes=1 of its own"):
        check(monkeypatch, 2, 1, **{name: "3"})


def test_another_launchers_world_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="2 in all, and WORLD_SIZE=4"):
        check(monkeypatch, 2, 1, LOCAL_RANK="0", WORLD_SIZE="4")


@pytest.mark.parametrize("variables", [{"NODE_RANK": "2"}, {"LOCAL_RANK": "4"}])
def test_a_rank_outside_of_the_world_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    with pytest.raises(ValueError, match=r"NODE_RANK=. and LOCAL_RANK=. do not fit.*=0 to 1"):
        check(monkeypatch, 2, 2, **variables, **PLACE)


def test_hosts_without_a_place_to_meet_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="num_nodes=2, and MASTER_ADDR and MASTER_PORT not set"):
        check(monkeypatch, 2, 2)
    with pytest.raises(ValueError, match="num_nodes=2, and MASTER_PORT not set"):
        check(monkeypatch, 2, 2, MASTER_ADDR="10.0.0.1")


@pytest.mark.parametrize("port", ["", "http", "0", "-1", "65536"])
def test_a_port_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    with pytest.raises(ValueError, match=f"MASTER_PORT='{port}' must be a number"):
        check(monkeypatch, 2, 1, MASTER_PORT=port)
