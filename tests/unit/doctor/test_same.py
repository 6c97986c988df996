from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lightning_dist.doctor.result import Status
from lightning_dist.doctor.same import judge_environments, output_of, probe_environment
from lightning_dist.engine.common.environment import Environment
from tests.unit.doctor.facts import ONE_HOST, TWO_HOSTS

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
