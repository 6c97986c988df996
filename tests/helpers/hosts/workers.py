"""The tests' pool of processes, on hosts: each enters its host when it starts."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from tests.helpers.hosts.cluster import Cluster
from tests.helpers.processes.workers import Worker, WorkerPool, serve

FIRST_PORT = 29500
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


class HostWorkers(WorkerPool):
    """Runs cases on processes of hosts, told of each other by Lightning's variables."""

    def __init__(self, cluster: Cluster, network: str = "eth0") -> None:
        """Starts nothing yet.

        Args:
            cluster: Has the hosts.
            network: Where the ranks look for the first one.
        """
        super().__init__()
        self._cluster = cluster
        self._network = network
        self._ports = count(FIRST_PORT)

    def run_on(
        self, hosts: Sequence[int], case: Callable[..., Any], *args: Any, timeout: float = 60.0
    ) -> list[Any]:
        """Runs a case on each rank and returns the results by rank.

        Args:
            hosts: The host of each rank: ``[0, 0, 1, 1]`` is two ranks on each of two hosts.
            case: A function of a module.
            args: Of the function.
            timeout: Seconds until a rank is said to hang.
        """
        nodes = list(dict.fromkeys(hosts))
        first = self._cluster.hosts[nodes[0]].address(self._network)
        port = str(next(self._ports))
        so_far: Counter[int] = Counter()
        places: dict[tuple[int, int], dict[str, str]] = {}
        for rank, host in enumerate(hosts):
            places[host, so_far[host]] = {
                "MASTER_ADDR": first,
                "MASTER_PORT": port,
                "WORLD_SIZE": str(len(hosts)),
                "RANK": str(rank),
                "LOCAL_RANK": str(so_far[host]),
                "NODE_RANK": str(nodes.index(host)),
            }
            so_far[host] += 1
        return self.run_at(places, case, *args, timeout=timeout)

    def start_worker(self, place: tuple[int, int]) -> Worker:
        """Starts the worker of a host and a local rank."""
        return Worker.start(_serve_inside, self._cluster.hosts[place[0]].namespaces.pid)


def _serve_inside(connection: Connection, pid: int) -> None:
    _enter(pid)
    # Only children are in the new process namespace.
    if child := os.fork():
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    serve(connection)


def _enter(pid: int) -> None:
    """Moves this process, and its children, into a process's namespaces."""
    folder = os.getcwd()
    files = [
        os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
        for kind in ("net", "uts", "ipc", "pid", "mnt")
    ]
    for file in files:
        if _LIBC.setns(file, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.close(file)
    os.chdir(folder)
