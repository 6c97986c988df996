from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
from typing import Any

import pytest

from lightning_dist.doctor import before
from lightning_dist.doctor.before import (
    BEFORE_MEETING,
    check_address,
    check_interface,
    check_limits,
    check_port,
    check_shared_memory,
)
from lightning_dist.doctor.report import Result, Status
from lightning_dist.engine.comms import interface
from tests.unit.doctor.facts import ONE_HOST, TWO_HOSTS, make_run


def check(result: Result, status: Status, *words: str) -> None:
    text = f"{result.found} {result.remedy}"
    assert result.status is status, text
    assert all(word in text for word in words), text


def test_an_address_is_known_and_not_each_host_itself() -> None:
    check(check_address(TWO_HOSTS), Status.OK, "10.0.0.1")
    loopback = {"address": "127.0.0.1"}
    check(check_address(make_run("a", "b", **loopback)), Status.FAIL, "each host itself")
    check(check_address(make_run("a", "a", **loopback)), Status.OK)
    unknown = make_run("a", address="no name")
    check(check_address(unknown), Status.FAIL, "MASTER_ADDR=no name is unknown", "/etc/hosts")


def test_a_taken_port_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    check(check_port(TWO_HOSTS), Status.OK, "served by the launcher")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        run = make_run("a", "b", serves=True, port=taken.getsockname()[1])
        check(check_port(run), Status.FAIL, "is taken", "ss -ltnp")
        other = make_run("a", "b", serves=True, port=taken.getsockname()[1], rank=1)
        check(check_port(other), Status.OK)  # rank 0 looks
    check(check_port(run), Status.OK, "free on rank 0's host")

    monkeypatch.setattr(before, "errno_of_serving", lambda port: errno.EACCES)
    check(check_port(run), Status.FAIL, "Permission denied", "1023")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a test says of a host's interfaces, first that its name leads to one of them."""
    said = {"loopback": False, "chosen": None}
    found = {"10.0.0.2": "eth0", "127.0.0.1": "lo"}
    monkeypatch.setattr(interface, "interfaces", lambda: found)
    monkeypatch.setattr(interface, "leads_to_loopback", lambda name, found: said["loopback"])
    monkeypatch.setattr(interface, "choose_interface", lambda address: said["chosen"])
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    return said


def test_an_interface_that_only_the_host_itself_reaches_is_a_failure(
    host: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(check_interface(TWO_HOSTS), Status.OK, "this host's name")
    host["loopback"] = True  # as Debian sets it
    check(check_interface(TWO_HOSTS), Status.FAIL, "GLOO_SOCKET_IFNAME", "eth0, lo")
    check(check_interface(ONE_HOST), Status.OK)
    host["chosen"] = "eth0"
    check(check_interface(TWO_HOSTS), Status.OK, "uses eth0, since")
    host["chosen"] = None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    check(check_interface(TWO_HOSTS), Status.OK, "uses eth0, as")


@pytest.mark.parametrize("value", ["ib0", "eth0,ib0"])
@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_an_interface_that_is_not_there_is_a_failure(
    host: dict[str, Any], monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    check(check_interface(ONE_HOST), Status.FAIL, "eth0, lo", variable)


# NCCL's ways to say "all but" and "exactly", and the beginning of a name.
@pytest.mark.parametrize("value", ["^docker", "=eth0", "eth"])
def test_nccl_names_interfaces_in_its_own_ways(
    host: dict[str, Any], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    check(check_interface(ONE_HOST), Status.OK)


def test_little_shared_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 64_000_000
    monkeypatch.setattr(os.path, "isdir", lambda path: free > 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, free))
    check(check_shared_memory(ONE_HOST), Status.WARN, "64 MB", "--shm-size")
    free = 2_000_000_000
    check(check_shared_memory(ONE_HOST), Status.OK)
    free = 0
    check(check_shared_memory(ONE_HOST), Status.WARN, "no /dev/shm")


def test_low_limits_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(files: int, locked: int, *, infiniband: bool = True) -> Result:
        limits = {resource.RLIMIT_NOFILE: (files, 4096), resource.RLIMIT_MEMLOCK: (locked, locked)}
        monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
        monkeypatch.setattr(os.path, "isdir", lambda path: infiniband)
        return check_limits(ONE_HOST)

    check(limit(256, -1), Status.WARN, "at most 256", "ulimit -n 4096")
    check(limit(4096, 65536), Status.WARN, "ulimit -l")
    check(limit(4096, -1), Status.OK)
    check(limit(4096, 65536, infiniband=False), Status.OK)


def test_all_checks_end_here() -> None:
    run = make_run("a", address="127.0.0.1")
    for it in BEFORE_MEETING:
        assert it.conclude(run, {0: it.attempt(run)}).found
