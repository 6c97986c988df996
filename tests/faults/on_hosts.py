"""Execute cases on two hosts, namespaces of this machine, with an agent of torchrun's on each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from typing_extensions import override

from tests.faults.case import Case
from tests.faults.execution import Place, Run, environment_of, write_plan
from tests.faults.inject import Injector
from tests.helpers.hosts.cluster import hosts
from tests.helpers.hosts.namespaces import HostProcess


class HostsRun:
    """The agents of both hosts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.agents: list[HostProcess] = []

    @property
    def output(self) -> str:
        return self._path.read_text() if self._path.exists() else ""

    def exit_codes(self) -> list[int | None]:
        return [agent.poll() for agent in self.agents]


class HostsPlace(Place):
    """Starts each attempt on two new hosts, which see this machine's files."""

    @override
    @contextmanager
    def _started(
        self, case: Case, folder: Path, checkpoints: Path, port: int
    ) -> Iterator[tuple[Run, Injector]]:
        if case.launcher != "two hosts":
            with super()._started(case, folder, checkpoints, port) as started:
                yield started
            return
        attempt = len(list(folder.glob("plan.*")))
        pipe, output = folder / f"phases.{attempt}", folder / f"output.{attempt}"
        run = HostsRun(output)
        with hosts(2) as cluster, output.open("a") as file:
            injector = Injector(
                pipe, case.faults, lambda: run.agents[0].inner_pid, folder / "filler", cluster.hosts
            )
            path = write_plan(case, folder, checkpoints, pipe)
            for host in cluster.hosts:
                options = [
                    "--nnodes=2",
                    "--nproc-per-node=1",
                    f"--node-rank={host.index}",
                    "--master-addr=host0",
                    f"--master-port={port}",
                ]
                script = ["-m", "tests.faults.rank", str(path)]
                command = [sys.executable, "-m", "torch.distributed.run", *options, *script]
                environment = {**environment_of(folder), "GLOO_SOCKET_IFNAME": "eth0"}
                agent = host.popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
                run.agents.append(agent)
            try:
                yield run, injector
            finally:
                injector.close()
