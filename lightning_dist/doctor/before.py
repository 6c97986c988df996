"""Checks of a host by itself, before the ranks meet: addresses, ports, memory, limits, cores."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

import torch

from lightning_dist.doctor.check import Check, Run, each
from lightning_dist.doctor.launch import LauncherFacts, find_launchers, judge_launcher
from lightning_dist.doctor.result import Result, fail, ok, warn
from lightning_dist.engine.common.names import shorten
from lightning_dist.engine.common.table import format_bytes
from lightning_dist.engine.comms import interface

_SHM_BYTES = 1_000_000_000
_FILES_ALONE, _FILES_PER_RANK = 512, 8  # a process's own, and connections of its groups


@dataclass(frozen=True, slots=True)
class AddressFacts:
    """Where the ranks are to meet, as this host sees it."""

    resolved: tuple[str, ...]  # the numbers of the address
    error: str = ""  # why there are none


def _probe_address(run: Run) -> AddressFacts:
    try:
        return AddressFacts(_resolve(run.launch.address))
    except OSError as error:
        return AddressFacts((), str(error))


def judge_address(run: Run, facts: AddressFacts) -> Result:
    """Judges the address where the ranks are to meet."""
    address = run.launch.address
    if facts.error:
        return fail(
            f"MASTER_ADDR={address} is unknown here: {facts.error}",
            "Set MASTER_ADDR to the IP address of rank 0's host, or add its name to /etc/hosts.",
        )
    if run.has_several_hosts and all(map(_is_loopback, facts.resolved)):
        return fail(
            f"MASTER_ADDR={address} is {facts.resolved[0]}, each host itself",
            "Set MASTER_ADDR to an address of rank 0's host that the other hosts reach.",
        )
    return ok(f"MASTER_ADDR={address} is {', '.join(facts.resolved)}")


def _probe_port(run: Run) -> int:
    """Returns the error number of binding the port, or 0, where it is rank 0's to serve."""
    if run.launch.rank > 0 or not run.launch.serves:
        return 0
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return _errno_of(lambda: taken.bind(("", run.launch.port)))


def judge_port(run: Run, error: int) -> Result:
    """Judges whether rank 0 can serve the port at which the ranks are to meet."""
    port = run.launch.port
    if error == errno.EADDRINUSE:
        return fail(
            f"MASTER_PORT={port} is taken by another process",
            f"Set another MASTER_PORT, or end that process: `ss -ltnp sport = :{port}` names it.",
        )
    if error:
        return fail(f"MASTER_PORT={port}: {os.strerror(error)}", "Set MASTER_PORT above 1023.")
    whose = "free on rank 0's host" if run.launch.serves else "served by the launcher"
    return ok(f"MASTER_PORT={port} is {whose}")


@dataclass(frozen=True, slots=True)
class InterfaceFacts:
    """The network interfaces of a host.

    Attributes:
        names: Names of the interfaces.
        taken: The value of ``GLOO_SOCKET_IFNAME``.
        nccl: The value of ``NCCL_SOCKET_IFNAME``.
        is_loopback: Whether gloo would take the loopback by itself.
        chosen: What the strategies take in its place; None if they cannot tell.
    """

    names: tuple[str, ...]
    taken: str
    nccl: str
    is_loopback: bool
    chosen: str | None


def _probe_interface(run: Run) -> InterfaceFacts:
    found = interface.interfaces()
    return InterfaceFacts(
        names=tuple(sorted(set(found.values()))),
        taken=os.environ.get(interface.VARIABLE, ""),
        nccl=os.environ.get("NCCL_SOCKET_IFNAME", ""),
        is_loopback=interface.leads_to_loopback(socket.gethostname(), found),
        chosen=interface.choose_interface(run.launch.address),
    )


def judge_interface(run: Run, facts: InterfaceFacts) -> Result:
    """Judges which network interface gloo and NCCL would use."""
    for variable, value in (
        (interface.VARIABLE, facts.taken),
        # NCCL takes beginnings of names; "=" asks for whole ones, "^" for all others.
        ("NCCL_SOCKET_IFNAME", "" if facts.nccl.startswith("^") else facts.nccl.lstrip("=")),
    ):
        known = [n for n in value.split(",") if any(name.startswith(n) for name in facts.names)]
        if len(known) < len(value.split(",")):
            return fail(
                f"{variable}={value}, but this host has {shorten(facts.names)}",
                f"Set {variable} to an interface of this host, or unset it.",
            )
    if facts.taken:
        return ok(f"gloo uses {facts.taken}, as {interface.VARIABLE} says")
    if not run.has_several_hosts:
        return ok("one host")
    if not facts.is_loopback:
        return ok("gloo uses the interface of this host's name")
    if facts.chosen is None:
        return fail(
            f"this host's name leads to the loopback; there are {shorten(facts.names)}",
            f"Set {interface.VARIABLE} to the interface that leads to the other hosts.",
        )
    return ok(f"gloo uses {facts.chosen}, since this host's name leads to the loopback")


def _probe_shm(run: Run) -> int:
    """Returns the free bytes of shared memory; -1 without any."""
    return shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else -1


def judge_shm(run: Run, free: int) -> Result:
    """Judges the shared memory that DataLoader workers and NCCL need."""
    if free < 0:
        return warn("no /dev/shm", "Mount a tmpfs there; in a container give --shm-size=8g.")
    if free < _SHM_BYTES:
        return warn(
            f"/dev/shm has {format_bytes(free)} free: DataLoader workers may die of SIGBUS",
            "Give the container --shm-size=8g or --ipc=host, or remove old files there.",
        )
    return ok(f"/dev/shm has {format_bytes(free)} free")


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """The limits of this process."""

    files: int  # open files, at most
    hard_files: int  # the most that the process may ask for
    locked_bytes: int  # locked memory, at most; -1 for any
    has_infiniband: bool  # whether the host has InfiniBand, which locks memory


def _probe_limits(run: Run) -> LimitFacts:
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return LimitFacts(files, hard, locked, os.path.isdir("/sys/class/infiniband"))


def judge_limits(run: Run, facts: LimitFacts) -> Result:
    """Judges the limits of this process."""
    needed = _FILES_ALONE + _FILES_PER_RANK * run.launch.world_size
    if facts.files < needed:
        return warn(
            f"at most {facts.files} open files, and {needed} may be needed",
            f"ulimit -n {max(needed, min(65536, facts.hard_files))} before the start.",
        )
    if facts.has_infiniband and facts.locked_bytes >= 0:
        return warn(
            f"InfiniBand, but only {format_bytes(facts.locked_bytes)} of memory may be locked",
            "ulimit -l unlimited; in a container --ulimit memlock=-1.",
        )
    return ok(f"{facts.files} open files")


@dataclass(frozen=True, slots=True)
class CoreFacts:
    """Cores and threads."""

    usable: int  # cores that this process may use
    of_host: int  # cores of the host
    threads: int  # threads that torch computes with


def _probe_cores(run: Run) -> CoreFacts:
    of_host = os.cpu_count() or 1
    return CoreFacts(len(os.sched_getaffinity(0)), of_host, torch.get_num_threads())


def judge_cores(run: Run, facts: Mapping[int, CoreFacts]) -> Result:
    """Judges whether the ranks of each host compute with more threads than it has cores."""
    ranks = Counter(run.hosts[rank] for rank in facts)
    for rank, own in facts.items():
        host = run.hosts[rank]
        fitting = max(1, own.of_host // ranks[host])
        if own.threads > own.usable:
            return warn(
                f"{run.places([rank])} computes with {own.threads} threads, and is bound to"
                f" {own.usable} cores",
                f"OMP_NUM_THREADS={own.usable}, or let the launcher bind less"
                " (mpirun --bind-to none).",
            )
        if own.threads * ranks[host] > own.of_host and own.threads > 1:
            return warn(
                f"{host}: {ranks[host]} ranks of {own.threads} threads on {own.of_host} cores",
                f"OMP_NUM_THREADS={fitting}.",
            )
    first = facts[min(facts)]
    return ok(f"{first.threads} threads a rank, {first.of_host} cores a host")


def _probe_launcher(run: Run) -> LauncherFacts:
    return find_launchers()


def _judge_launcher(run: Run, facts: LauncherFacts) -> Result:
    return judge_launcher(run.launch, facts)


def _resolve(name: str) -> tuple[str, ...]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def _errno_of(action: Callable[[], object]) -> int:
    try:
        action()
    except OSError as error:
        return error.errno or errno.EINVAL
    return 0


_NAMES = "Ask the host's name server: `getent hosts NAME` should answer at once."

BEFORE_MEETING: tuple[Check[Any], ...] = (
    Check("launcher", _probe_launcher, each(_judge_launcher), "Uninstall mpi4py."),
    Check("address", _probe_address, each(judge_address), _NAMES),
    Check("port", _probe_port, each(judge_port), _NAMES),
    Check("interface", _probe_interface, each(judge_interface), _NAMES),
    Check("shared memory", _probe_shm, each(judge_shm), "Look at /dev/shm."),
    Check("limits", _probe_limits, each(judge_limits), "Look at `ulimit -a`."),
    Check("cores", _probe_cores, judge_cores, "Look at `nproc` and OMP_NUM_THREADS."),
)
