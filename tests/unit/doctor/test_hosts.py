from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_dist.doctor.check import Run
from lightning_dist.doctor.hosts import (
    Device,
    check_axes,
    check_cores,
    cores_of,
    judge_devices,
    judge_environments,
    output_of,
    probe_device,
    probe_environment,
)
from lightning_dist.doctor.report import Result, Status
from lightning_dist.engine.common.environment import Environment
from tests.unit.doctor.facts import ONE_HOST, TWO_HOSTS, make_run, with_mesh

SAME = {"Python": "3.11.2", "torch": "2.13.0", "lightning": "2.6.6"}


def judged(**other: str) -> tuple[Status, str]:
    facts = {rank: Environment(host, SAME) for rank, host in TWO_HOSTS.hosts.items()}
    facts[3] = Environment("b", SAME | other)
    result = judge_environments(TWO_HOSTS, facts)
    return result.status, f"{result.found}\n{result.table}"


def test_another_version_of_what_computes_is_a_failure() -> None:
    assert judged()[0] is Status.OK
    status, text = judged(torch="2.12.1")
    assert status is Status.FAIL
    assert "differ in torch" in text
    assert "2.12.1  b (rank 3)" in text
    assert judged(code="0123")[0] is Status.FAIL


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    run = replace(TWO_HOSTS, script=tmp_path / "train.py")
    missing = probe_environment(run)
    result = judge_environments(run, dict.fromkeys(run.hosts, missing))
    assert (result.status, result.table) == (Status.FAIL, None)
    assert result.found.endswith(f"b (ranks 2, 3): there is no script {run.script}")
    run.script.touch()
    result = judge_environments(run, {0: probe_environment(run), 1: missing})
    assert result.found == f"a (rank 1): there is no script {run.script}"
    assert result.table is not None


def test_another_variable_is_a_warning() -> None:
    status, text = judged(NCCL_ALGO="Ring")
    assert status is Status.WARN
    assert "(not set)  a (ranks 0, 1), b (rank 2)" in text


def test_code_is_compared_by_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no repository
    values = probe_environment(ONE_HOST).values
    assert values["git commit"] == "none"
    assert values["script"] == "none"
    assert len(values["code"]) == 16
    for command in (
        "git init -q .",
        "git -c user.name=a -c user.email=a commit -qm x --allow-empty",
    ):
        subprocess.run(command.split(), check=True)
    assert len(probe_environment(ONE_HOST).values["git commit"]) == 40
    assert output_of("no-such-command") == ""


GPUS = {
    rank: Device(number=2, identity=f"uuid-{rank}", name="X100", memory=80_000_000_000)
    for rank in range(4)
}


def judged_gpus(**other: object) -> tuple[Status, str]:
    result = judge_devices(TWO_HOSTS, {**GPUS, 3: replace(GPUS[3], **other)})
    return result.status, result.found


def test_a_host_without_a_gpu_says_so() -> None:
    result = judge_devices(ONE_HOST, dict.fromkeys((0, 1), probe_device(ONE_HOST)))
    assert result.status is Status.OK
    assert "no GPU" in result.found


def test_each_rank_has_a_gpu_of_its_own() -> None:
    assert judged_gpus() == (Status.OK, "X100, 80 GB, one for each rank; direct access")
    status, text = judged_gpus(identity="uuid-2")
    assert status is Status.FAIL
    assert "one GPU for b (ranks 2, 3)" in text
    # The same number on another host is another GPU.
    assert judged_gpus(identity="uuid-0")[0] is Status.OK
    status, text = judged_gpus(identity="")
    assert status is Status.FAIL
    assert "no GPU is left for b (rank 3)" in text


def test_other_gpus_and_far_cores_are_warnings() -> None:
    status, text = judged_gpus(name="X90")
    assert status is Status.WARN
    assert "X100: a (ranks 0, 1), b (rank 2); X90: b (rank 3)" in text
    status, text = judged_gpus(has_near_core=False)
    assert status is Status.WARN
    assert "NUMA" in text
    assert "no direct access among those of b (rank 3)" in judged_gpus(reaches_all=False)[1]


def test_tensor_parallel_ranks_on_several_hosts_are_a_warning() -> None:
    assert check_axes(with_mesh(TWO_HOSTS, pp=2, tp=2)).status is Status.OK
    result = check_axes(with_mesh(TWO_HOSTS, tp=4))
    assert result.status is Status.WARN
    assert "mesh: a, b" in result.found


def test_more_threads_than_cores_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(run: Run, *, usable: int = 8, of_host: int = 8, threads: int) -> Result:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(usable)))
        monkeypatch.setattr(os, "cpu_count", lambda: of_host)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        return check_cores(run)

    assert checked(TWO_HOSTS, threads=4).status is Status.OK
    result = checked(TWO_HOSTS, threads=8)
    assert result.status is Status.WARN
    assert result.found == "2 ranks of 8 threads on 8 cores"
    assert result.remedy == "OMP_NUM_THREADS=4."
    bound = checked(make_run("a", "b"), usable=1, threads=4)  # as mpirun does
    assert bound.status is Status.WARN
    assert "--bind-to none" in bound.remedy
    assert checked(TWO_HOSTS, usable=1, of_host=1, threads=1).status is Status.OK


def test_the_kernels_list_of_cores_is_read() -> None:
    assert cores_of("0-2,8") == {0, 1, 2, 8}
    assert cores_of("") == set()
