from __future__ import annotations

import argparse

import pytest

from lightning_dist.doctor import command
from lightning_dist.doctor.command import (
    add_arguments,
    parse_choice,
    run_doctor,
    suitable_choices,
)
from lightning_dist.engine.common.mesh_shape import MeshShape


def test_a_strategy_is_named_with_its_sizes() -> None:
    assert parse_choice("mesh:pp=2,tp=2")().mesh_shape(8) == MeshShape(2, 1, 2, 2)
    assert parse_choice("fsdp:shard_size=2")().mesh_shape(4).dp_replicate == 2
    assert parse_choice("pipeline_pipedream")().asynchronous


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dpp", "dpp: use one of ddp, fsdp"),
        ("ddp:size=2", "DDPStrategy has no argument 'size'"),
        ("mesh:tp=0", "tp=0"),
    ],
)
def test_a_wrong_strategy_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_choice(text)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 12])
def test_the_strategies_of_each_number_of_ranks_fit_it(world_size: int) -> None:
    for name in suitable_choices(world_size):
        assert parse_choice(name)().mesh_shape(world_size).world_size == world_size


def diagnose(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run_doctor(parser, parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--devices=0", "--devices=0 must be an integer of at least 1"),
        ("--devices=-1", "--devices=-1 must be an integer of at least 1"),
        ("--nodes=0", "--nodes=0 must be an integer of at least 1"),
        ("--seconds=0", "--seconds=0.0 must be a number above 0"),
        ("--seconds=-5", "--seconds=-5.0 must be a number above 0"),
        ("--parameters=-7e9", "--parameters=-7000000000.0 must be a number above 0"),
        ("--parameters=nan", "--parameters=nan must be a number above 0"),
    ],
)
def test_a_wrong_number_is_refused(
    argument: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_environment", pytest.fail)  # it is too late then
    with pytest.raises(SystemExit):
        diagnose(argument)
    assert message in capsys.readouterr().err


def test_a_strategy_that_does_not_fit_the_ranks_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    assert diagnose("--strategy", "mesh:tp=2") == 1
    output = capsys.readouterr().out
    assert "must multiply to the world size of 3" in output
    assert "Not checked after that: all else." in output
    monkeypatch.setenv("RANK", "1")
    assert diagnose("--strategy", "mesh:tp=2") == 1
    assert capsys.readouterr().out == ""  # rank 0 says it


def test_variables_that_lightning_refuses_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # which Lightning would leave set
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert diagnose() == 1
    assert "--ntasks-per-node=4" in capsys.readouterr().out
    for name in ("SLURM_NTASKS_PER_NODE", "SLURM_PROCID", "SLURM_LOCALID"):
        monkeypatch.setenv(name, "4")
    assert diagnose() == 1
    assert "rank 4 of 4" in capsys.readouterr().out


def test_hosts_that_cannot_meet_are_a_failure_before_ranks_are_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)
    assert diagnose("--devices", "1", "--nodes", "2") == 1
    output = capsys.readouterr().out
    assert output.startswith("FAIL  launcher")
    assert "MASTER_ADDR and MASTER_PORT not set" in output
