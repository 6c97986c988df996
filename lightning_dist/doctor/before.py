"""Checks of a host by itself, before the ranks meet: addresses, ports, memory and limits."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from ipaddress import ip_address

from lightning_dist.doctor.check import Check, Run, worst_of
from lightning_dist.doctor.launch import check_launcher
from lightning_dist.doctor.report import Result, fail, ok, warn
from lightning_dist.engine.common.names import shorten
from lightning_dist.engine.common.table import format_bytes
from lightning_dist.engine.comms import interface
from lightning_dist.engine.comms.contact import errno_of_serving, explain_contact, explain_serving

_SHM_BYTES = 1_000_000_000
_FILES_ALONE, _FILES_PER_RANK = 512, 8  # a process's own, and connections of its groups


def check_address(run: Run) -> Result:
    """Checks the address where the ranks are to meet."""
    address = run.launch.address
    try:
        answers = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return fail(*explain_contact(address, run.launch.port, error))
    numbers = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
    if run.has_several_hosts and all(
        ip_address(it.partition("%")[0]).is_loopback for it in numbers
    ):
        return fail(
            f"MASTER_ADDR={address} is {numbers[0]}, each host itself",
            "Set MASTER_ADDR to an address of rank 0's host that the other hosts reach.",
        )
    return ok(f"MASTER_ADDR={address} is {', '.join(numbers)}")


def check_port(run: Run) -> Result:
    """Checks whether rank 0 can serve the port at which the ranks are to meet."""
    port = run.launch.port
    if not run.launch.serves:
        return ok(f"MASTER_PORT={port} is served by the launcher")
    if run.launch.rank == 0 and (error := errno_of_serving(port)):
        return fail(*explain_serving(port, error))
    return ok(f"MASTER_PORT={port} is free on rank 0's host")


def check_interface(run: Run) -> Result:
    """Checks which network interface gloo and NCCL would use."""
    found = interface.interfaces()
    names = sorted(set(found.values()))
    gloo, nccl = (os.environ.get(name, "") for name in (interface.VARIABLE, "NCCL_SOCKET_IFNAME"))
    for variable, value in (
        (interface.VARIABLE, gloo),
        # NCCL takes beginnings of names; "=" asks for whole ones, "^" for all others.
        ("NCCL_SOCKET_IFNAME", "" if nccl.startswith("^") else nccl.lstrip("=")),
    ):
        if not all(any(it.startswith(start) for it in names) for start in value.split(",")):
            return fail(
                f"{variable}={value}, but this host has {shorten(names)}",
                f"Set {variable} to an interface of this host, or unset it.",
            )
    if gloo:
        return ok(f"gloo uses {gloo}, as {interface.VARIABLE} says")
    if not run.has_several_hosts:
        return ok("one host")
    if not interface.leads_to_loopback(socket.gethostname(), found):
        return ok("gloo uses the interface of this host's name")
    chosen = interface.choose_interface(run.launch.address)
    if chosen is None:
        return fail(
            f"this host's name leads to the loopback; there are {shorten(names)}",
            f"Set {interface.VARIABLE} to the interface that leads to the other hosts.",
        )
    return ok(f"gloo uses {chosen}, since this host's name leads to the loopback")


def check_shared_memory(run: Run) -> Result:
    """Checks the shared memory that DataLoader workers and NCCL need."""
    if not os.path.isdir("/dev/shm"):
        return warn("no /dev/shm", "Mount a tmpfs there; in a container give --shm-size=8g.")
    free = shutil.disk_usage("/dev/shm").free
    if free < _SHM_BYTES:
        return warn(
            f"/dev/shm has {format_bytes(free)} free: DataLoader workers may die of SIGBUS",
            "Give the container --shm-size=8g or --ipc=host, or remove old files there.",
        )
    return ok(f"/dev/shm has {format_bytes(free)} free")


def check_limits(run: Run) -> Result:
    """Checks how many files this process may open, and how much memory it may lock."""
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    needed = _FILES_ALONE + _FILES_PER_RANK * run.launch.world_size
    if files < needed:
        return warn(
            f"at most {files} open files, and {needed} may be needed",
            f"ulimit -n {max(needed, min(65536, hard))} before the start.",
        )
    if os.path.isdir("/sys/class/infiniband") and locked != resource.RLIM_INFINITY:
        return warn(
            f"InfiniBand, but only {format_bytes(locked)} of memory may be locked",
            "ulimit -l unlimited; in a container --ulimit memlock=-1.",
        )
    return ok(f"{files} open files")


_NAMES = "Ask the host's name server: `getent hosts NAME` should answer at once."

BEFORE_MEETING = (
    Check("launcher", lambda run: check_launcher(run.launch), worst_of, "Uninstall mpi4py."),
    Check("address", check_address, worst_of, _NAMES),
    Check("port", check_port, worst_of, _NAMES),
    Check("interface", check_interface, worst_of, _NAMES),
    Check("shared memory", check_shared_memory, worst_of, "Look at /dev/shm."),
    Check("limits", check_limits, worst_of, "Look at `ulimit -a`."),
)
