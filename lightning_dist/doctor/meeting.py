"""The ranks meet at rank 0's store, within a time, and rank 0 names those that do not come."""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_dist.doctor.check import Check, Run, worst_of
from lightning_dist.doctor.launch import Launch
from lightning_dist.doctor.report import Result, StoppedError, fail, ok
from lightning_dist.engine.common.names import shorten
from lightning_dist.engine.comms import interface
from lightning_dist.engine.comms.contact import ContactError, await_port, open_store
from lightning_dist.engine.comms.meeting import MISSING_REMEDY, describe_missing

_POLL_SECONDS = 0.05
GRACE_SECONDS = 10.0  # for rank 0 to judge, or to be a little late


class Meeting:
    """The store at which the ranks have met; they wait for each other for some seconds.

    Raises:
        StoppedError: This rank could not reach the store.
    """

    def __init__(self, launch: Launch, seconds: float) -> None:
        self._launch = launch
        self._deadline = time.monotonic() + seconds
        place, serves = (launch.address, launch.port), launch.rank == 0 and launch.serves
        try:
            if not serves:
                await_port(*place, seconds)
            store = open_store(*place, is_master=serves)
        except ContactError as error:
            raise StoppedError("meeting", fail(error.found, error.remedy)) from error
        # torchrun keeps one store for all attempts.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = dist.PrefixStore(f"lightning_dist/doctor/{attempt}", store)

    def gather(
        self, name: str, value: object, seconds: float, ranks: Collection[int]
    ) -> dict[int, Any]:
        """Gathers a value of some ranks on rank 0, which waits for them.

        On rank 0 these are the values that came in time, on another rank its own.
        """
        own = self._launch.rank
        self._put(f"{name}/{own}", value)
        if own > 0:
            return {own: value}
        keys = {rank: f"{name}/{rank}" for rank in sorted(ranks)}
        deadline = time.monotonic() + seconds
        while not self.store.check([*keys.values()]) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return {rank: self._get(key) for rank, key in keys.items() if self.store.check([key])}

    def tell(self, name: str, value: object, seconds: float) -> Any:
        """Returns rank 0's value on all ranks.

        Raises:
            StoppedError: Rank 0 has said nothing.
        """
        if self._launch.rank == 0:
            self._put(name, value)
        try:
            self.store.wait([name], timedelta(seconds=seconds + GRACE_SECONDS))
        except RuntimeError as error:
            place = f"{self._launch.address}:{self._launch.port}"
            result = fail(
                f"rank 0 has not answered at {place} ({name})",
                "Look at rank 0's output. If it has not started there, another job uses this"
                " port: set another MASTER_PORT.",
            )
            raise StoppedError("meeting", result) from error
        return self._get(name)

    def _put(self, name: str, value: object) -> None:
        self.store.set(name, pickle.dumps(value).hex())

    def _get(self, name: str) -> Any:
        return pickle.loads(bytes.fromhex(self.store.get(name).decode()))

    def meet(self) -> dict[int, tuple[str, int]]:
        """Waits for all ranks; returns what those that have come say, the same on all ranks.

        These are the host, and the number of all ranks.
        """
        left = max(0.0, self._deadline - time.monotonic())
        own = (socket.gethostname(), self._launch.world_size)
        came = self.gather("rank", own, left, range(self._launch.world_size))
        told: dict[int, tuple[str, int]] = self.tell("ranks", came, left)
        return told


def judge_meeting(launch: Launch, came: Mapping[int, tuple[str, int]]) -> Result:
    """Judges whether all ranks have come, by the hosts and numbers of ranks that they say."""
    hosts = {rank: host for rank, (host, _) in came.items()}
    if len({size for _, size in came.values()}) > 1:
        counts = [f"rank {rank} of {size} ({host})" for rank, (host, size) in sorted(came.items())]
        return fail(
            f"the ranks count different numbers of ranks: {shorten(counts)}",
            "Start the same number of ranks on each host, with one launcher, and give it the same"
            " number of hosts everywhere.",
        )
    if len(hosts) == launch.world_size:
        return ok(f"{len(hosts)} ranks have met; hosts: {shorten(sorted(set(hosts.values())))}")
    return fail(describe_missing(launch.world_size, hosts, launch.ranks_per_host), MISSING_REMEDY)


def group_check(meeting: Meeting, seconds: float) -> Check[Result]:
    """Returns the check that connects each rank with each other one."""

    def form(run: Run) -> Result:
        backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if run.has_several_hosts and (name := interface.choose_interface(run.launch.address)):
            os.environ.setdefault(interface.VARIABLE, name)  # as the strategies do
        dist.init_process_group(
            backends,
            store=dist.PrefixStore("group", meeting.store),
            rank=run.launch.rank,
            world_size=run.launch.world_size,
            timeout=timedelta(seconds=run.seconds),
        )
        dist.all_reduce(torch.ones(1))
        return ok(f"all ranks are connected: {backends}")

    return Check(
        "process group",
        form,
        worst_of,
        "The ranks reach rank 0's port, but not each other's. Open all ports between the hosts, and"
        " set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the interface that joins them.",
        seconds + GRACE_SECONDS,
    )
