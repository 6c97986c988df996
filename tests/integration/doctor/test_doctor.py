"""The doctor on real processes, with a fault on one of them."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_dist.doctor import disk, meeting
from lightning_dist.doctor.command import add_arguments, run_doctor
from tests.helpers.processes.workers import WorkerPool

Answer = tuple[int, dict[str, Any]]


def diagnose(*arguments: str) -> Answer:
    """Runs the doctor in this process; gives its exit code, and its checks by name."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = run_doctor(parser, parser.parse_args([*arguments, "--json"]))
    document = json.loads(output.getvalue() or "{}")
    document["checks"] = {check["name"]: check for check in document.get("checks", ())}
    return code, document


def diagnose_two_hosts(root: str) -> Answer:
    """The second host is one by name, has another variable, a late clock and a disk of its own."""
    strategies = ("--strategy", "tensor_parallel", "--strategy", "ddp")
    true_time = time.time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "_SEEN_SECONDS", 0.5)
        if os.environ["RANK"] == "0":
            return diagnose("--root", root, *strategies)
        patch.setattr(socket, "gethostname", lambda: "other")
        patch.setattr(time, "time", lambda: true_time() - 5.0)
        patch.setenv("NCCL_ALGO", "Ring")
        return diagnose("--root", f"{root}/other", *strategies)


def test_faults_of_another_host_are_named(workers: WorkerPool, tmp_path: Path) -> None:
    (code, document), other = workers.run(2, diagnose_two_hosts, str(tmp_path))
    assert code == other[0] == 1
    assert other[1] == {"checks": {}}  # rank 0 prints for all
    checks = document["checks"]
    found = {name: (check["status"], check["found"]) for name, check in checks.items()}
    assert found["environment"] == ("WARN", "hosts differ in NCCL_ALGO")
    assert ["", "Ring", "other (rank 1)"] in checks["environment"]["table"]
    assert found["clocks"] == ("WARN", "other (rank 1): the clock is -5.0 s from rank 0's")
    assert found["axes"][0] == "WARN"
    assert found["disk"][0] == "FAIL"
    assert found["disk"][1].startswith("other (rank 1): ")
    assert "is not shared: rank 0's files cannot be seen" in found["disk"][1]
    assert "equal to one device" in found["ddp"][1]
    assert "all-reduces are right" in found["all-reduce"][1]
    assert document["not_checked"] == []
    assert list(tmp_path.rglob("*")) == []  # nor the directory that was missing


def diagnose_with_one_missing() -> Answer:
    os.environ["WORLD_SIZE"] = "3"
    return diagnose("--seconds", "1")


def test_a_missing_rank_is_named(workers: WorkerPool) -> None:
    (code, document), other = workers.run(2, diagnose_with_one_missing)
    assert code == other[0] == 1
    assert "2 of 3 ranks have met; missing: 2" in document["checks"]["meeting"]["found"]
    assert "launcher" in document["checks"]
    assert other[1] == {"checks": {}}


def diagnose_with_another_number() -> Answer:
    os.environ["WORLD_SIZE"] = str(2 + int(os.environ["RANK"]))
    return diagnose("--seconds", "1", "--strategy", "ddp")


def test_ranks_that_count_others_are_named(workers: WorkerPool) -> None:
    (code, document), other = workers.run(2, diagnose_with_another_number)
    assert code == other[0] == 1
    assert "rank 0 of 2" in document["checks"]["meeting"]["found"]
    assert "rank 1 of 3" in document["checks"]["meeting"]["found"]
    assert "process group" in document["not_checked"]
    assert other[1] == {"checks": {}}


def test_a_file_is_no_directory(workers: WorkerPool, tmp_path: Path) -> None:
    root = tmp_path / "file"
    root.touch()
    [(code, document)] = workers.run(1, diagnose, "--root", str(root), "--strategy", "ddp")
    assert code == 1
    assert "is no directory" in document["checks"]["disk"]["found"]
    assert "ddp" in document["checks"]


def diagnose_without_rank_0() -> Answer:
    if os.environ["RANK"] == "0":
        return 0, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "GRACE_SECONDS", 0.5)
        return diagnose("--seconds", "0.5")


def test_a_rank_that_meets_nobody_prints_its_own(workers: WorkerPool) -> None:
    # The store is there, as torchrun's is, but no rank 0.
    _, (code, document) = workers.run(2, diagnose_without_rank_0)
    assert code == 1
    assert "rank 0 has not answered" in document["checks"]["meeting"]["found"]
    assert document["checks"]["address"]["status"] == "OK"


def diagnose_with_a_failing_group() -> Answer:
    if os.environ["RANK"] == "1":
        os.environ["GLOO_SOCKET_IFNAME"] = "ib0"
    return diagnose("--seconds", "1")


def test_a_group_that_does_not_form_is_a_failure(workers: WorkerPool) -> None:
    (code, document), other = workers.run(2, diagnose_with_a_failing_group)
    assert code == other[0] == 1
    checks = document["checks"]
    assert "GLOO_SOCKET_IFNAME=ib0, but this host has" in checks["interface"]["found"]
    assert checks["process group"]["status"] == "FAIL"
    assert "(rank 1)" in checks["process group"]["found"]
    assert "environment" in document["not_checked"]
