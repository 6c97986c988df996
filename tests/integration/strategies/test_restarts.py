"""A run that torchrun starts again goes on from its last checkpoint, as if nothing had happened."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from tests.helpers.processes.restarted_fit import STEPS_OF_BEGIN, train, world_of
from tests.helpers.processes.workers import WorkerPool, free_port

PATIENCE_SECONDS = 240.0


@pytest.fixture
def as_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes what an agent leaves in the environment."""
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def launch(name: str, *arguments: str, restarts: int, hosts: int = 1) -> list[int]:
    """Runs torchrun's agents, whose processes need import nothing; gives what each returned."""
    options = {
        "nnodes": hosts,
        "nproc-per-node": world_of(name) // hosts,
        "max-restarts": restarts,
        "rdzv-backend": "c10d",  # this and the next two are what --standalone is short for
        "rdzv-endpoint": f"localhost:{0 if hosts == 1 else free_port()}",
        "rdzv-id": uuid4().hex,
        "local-addr": "localhost",
        "start-method": "forkserver",
    }
    given = [f"--{name}={value}" for name, value in options.items()]
    with ThreadPoolExecutor() as agents:
        runs = []
        for _ in range(hosts):
            config, *_ = config_from_args(parse_args([*given, "restarted_fit.py"]))
            runs.append(agents.submit(elastic_launch(config, train), name, *arguments))
    return [step for run in runs for step in run.result().values()]


def weights_in(folder: Path, name: str) -> list[dict[str, torch.Tensor]]:
    files = [folder / f"weights.{rank}" for rank in range(world_of(name))]
    return [torch.load(file, weights_only=True) for file in files]


def assert_equal_to_uninterrupted(workers: WorkerPool, folder: Path, name: str) -> None:
    whole = folder / "whole"
    world_size = world_of(name)
    assert workers.run(world_size, train, name, str(whole)) == [0] * world_size
    pairs = zip(weights_in(folder, name), weights_in(whole, name), strict=True)
    for found, expected in pairs:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.some("pipedream_2bw-*")
@pytest.mark.parametrize(
    ("name", "hosts", "troubles"),
    [
        ("1f1b", 1, ["sigkill"]),
        ("pipedream", 1, ["raise", "sigkill"]),
        ("ddp", 1, ["raise"]),
        ("ddp", 2, ["sigkill", "sigkill"]),
        ("fsdp", 1, ["sigkill"]),
        ("tensor", 1, ["sigkill"]),
        ("pipedream_2bw", 1, ["sigkill"]),
        ("mesh", 1, ["sigkill"]),
    ],
    ids=str,
)
@pytest.mark.usefixtures("as_launcher")
def test_restarts_end_with_the_weights_of_an_uninterrupted_run(
    workers: WorkerPool, tmp_path: Path, name: str, hosts: int, troubles: list[str]
) -> None:
    begun = launch(name, str(tmp_path), *troubles, restarts=len(troubles), hosts=hosts)
    assert begun == [STEPS_OF_BEGIN[len(troubles)]] * world_of(name)
    assert_equal_to_uninterrupted(workers, tmp_path, name)


@pytest.mark.long
def test_torchrun_itself(workers: WorkerPool, tmp_path: Path) -> None:
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    script = ["-m", "tests.helpers.processes.restarted_fit", "ddp", str(tmp_path), "sigkill"]
    environment = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "LOCAL_RANK")}
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, *script],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.findall(r"has begun at step (\d)", run.stdout) == ["4", "4"]
    assert_equal_to_uninterrupted(workers, tmp_path, "ddp")
