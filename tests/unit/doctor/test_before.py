from __future__ import annotations

import errno
import socket
from dataclasses import replace

import pytest

from lightning_dist.doctor.before import (
    BEFORE_MEETING,
    AddressFacts,
    CoreFacts,
    InterfaceFacts,
    LimitFacts,
    judge_address,
    judge_cores,
    judge_interface,
    judge_limits,
    judge_port,
    judge_shm,
)
from lightning_dist.doctor.result import Result, Status
from tests.unit.doctor.facts import ONE_HOST, TWO_HOSTS, make_run

GOOD = InterfaceFacts(("eth0", "lo"), "", "", is_loopback=False, chosen=None)


def check(result: Result, status: Status, *words: str) -> None:
    text = f"{result.found} {result.remedy}"
    assert result.status is status, text
    assert all(word in text for word in words), text


def test_an_address_is_known_and_not_each_host_itself() -> None:
    check(judge_address(TWO_HOSTS, AddressFacts(("10.0.0.1",))), Status.OK)
    loopback = AddressFacts(("127.0.0.1",))
    check(judge_address(TWO_HOSTS, loopback), Status.FAIL, "each host itself")
    check(judge_address(ONE_HOST, loopback), Status.OK)
    unknown = AddressFacts((), "Name or service not known")
    check(judge_address(ONE_HOST, unknown), Status.FAIL, "is unknown here", "/etc/hosts")


def test_a_taken_port_is_found() -> None:
    check(judge_port(TWO_HOSTS, 0), Status.OK, "served by the launcher")
    check(judge_port(TWO_HOSTS, errno.EADDRINUSE), Status.FAIL, "29500 is taken", "ss -ltnp")
    check(judge_port(TWO_HOSTS, errno.EACCES), Status.FAIL, "Permission denied", "1023")
    [port] = [check for check in BEFORE_MEETING if check.name == "port"]
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        run = make_run("a", serves=True, port=taken.getsockname()[1])
        check(port.conclude(run, {0: port.attempt(run)}), Status.FAIL, "is taken")


def test_an_interface_that_only_the_host_itself_reaches_is_a_failure() -> None:
    check(judge_interface(TWO_HOSTS, GOOD), Status.OK, "this host's name")
    debian = replace(GOOD, is_loopback=True)
    check(judge_interface(TWO_HOSTS, debian), Status.FAIL, "GLOO_SOCKET_IFNAME", "eth0, lo")
    check(judge_interface(TWO_HOSTS, replace(debian, chosen="eth0")), Status.OK, "uses eth0")
    check(judge_interface(ONE_HOST, debian), Status.OK)
    check(judge_interface(TWO_HOSTS, replace(debian, taken="eth0")), Status.OK)


@pytest.mark.parametrize("value", ["ib0", "eth0,ib0"])
def test_an_interface_that_is_not_there_is_a_failure(value: str) -> None:
    check(judge_interface(ONE_HOST, replace(GOOD, taken=value)), Status.FAIL, "eth0, lo")
    check(judge_interface(ONE_HOST, replace(GOOD, nccl=value)), Status.FAIL, "NCCL_SOCKET")
    # NCCL's ways to say "all but" and "exactly", and the beginning of a name.
    for known in ("^docker", "=eth0", "eth"):
        check(judge_interface(ONE_HOST, replace(GOOD, nccl=known)), Status.OK)


def test_little_shared_memory_and_low_limits_are_warnings() -> None:
    check(judge_shm(ONE_HOST, 64_000_000), Status.WARN, "64 MB", "--shm-size")
    check(judge_shm(ONE_HOST, -1), Status.WARN, "no /dev/shm")
    check(judge_shm(ONE_HOST, 2_000_000_000), Status.OK)
    check(judge_limits(ONE_HOST, LimitFacts(256, 4096, -1, True)), Status.WARN, "ulimit -n 4096")
    check(judge_limits(ONE_HOST, LimitFacts(4096, 4096, 65536, True)), Status.WARN, "ulimit -l")
    check(judge_limits(ONE_HOST, LimitFacts(4096, 4096, 65536, False)), Status.OK)


def test_more_threads_than_cores_are_a_warning() -> None:
    fine = CoreFacts(usable=8, of_host=8, threads=4)
    check(judge_cores(TWO_HOSTS, dict.fromkeys(range(4), fine)), Status.OK)
    many = replace(fine, threads=8)
    result = judge_cores(TWO_HOSTS, dict.fromkeys(range(4), many))
    check(result, Status.WARN, "a: 2 ranks of 8 threads on 8 cores", "OMP_NUM_THREADS=4")
    bound = replace(fine, usable=1)  # as mpirun does
    result = judge_cores(TWO_HOSTS, {0: fine, 1: fine, 2: fine, 3: bound})
    check(result, Status.WARN, "b (rank 3)", "--bind-to none")
    single = CoreFacts(usable=1, of_host=1, threads=1)
    check(judge_cores(TWO_HOSTS, dict.fromkeys(range(4), single)), Status.OK)


def test_all_probes_end_here() -> None:
    run = make_run("a", address="127.0.0.1")
    for it in BEFORE_MEETING:
        assert it.conclude(run, {0: it.attempt(run)}).found
