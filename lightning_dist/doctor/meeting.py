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

from lightning_dist.doctor.check import Check, Run, each
from lightning_dist.doctor.launch import Launch
from lightning_dist.doctor.result import Result, fail, ok
from lightning_dist.engine.common.names import shorten
from lightning_dist.engine.comms import interface

_POLL_SECONDS = 0.05
_CONNECT_SECONDS = 3.0
_GRACE_SECONDS = 10.0  # for rank 0 to judge, or to be a little late


class NotMetError(Exception):
    """This rank has not met rank 0.

    Attributes:
        result: What it has found instead.
    """

    def __init__(self, result: Result) -> None:
        super().__init__(result.found)
        self.result = result


class Meeting:
    """The store at which the ranks have met.

    Args:
        launch: The launch of this process.
        seconds: How long the ranks wait for each other here.

    Raises:
        NotMetError: This rank could not reach the store.
    """

    def __init__(self, launch: Launch, seconds: float) -> None:
        self._launch = launch
        self._deadline = time.monotonic() + seconds
        if launch.rank > 0 or not launch.serves:
            _await_port(launch, self._deadline)
        try:
            store = dist.TCPStore(
                launch.address,
                launch.port,
                is_master=launch.rank == 0 and launch.serves,
                wait_for_workers=False,
                timeout=timedelta(seconds=seconds),
            )
        except RuntimeError as error:
            raise NotMetError(judge_contact(launch, error)) from error
        # torchrun keeps one store for all attempts.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = dist.PrefixStore(f"lightning_dist/doctor/{attempt}", store)

    def gather(
        self, name: str, value: object, seconds: float, ranks: Collection[int]
    ) -> dict[int, Any]:
        """Gathers a value of some ranks on rank 0.

        Args:
            name: A name that was not used before.
            value: This rank's value; must be picklable.
            seconds: How long rank 0 waits for the others.
            ranks: The ranks.

        Returns:
            On rank 0 the values that came in time, on another rank its own.
        """
        own = self._launch.rank
        if own > 0:
            self.store.set(f"{name}/{own}", pickle.dumps(value).hex())
            return {own: value}
        values: dict[int, Any] = {0: value}
        deadline = time.monotonic() + seconds
        while len(values) < len(ranks):
            for rank in set(ranks) - set(values):
                if self.store.check([f"{name}/{rank}"]):
                    text = self.store.get(f"{name}/{rank}").decode()
                    values[rank] = pickle.loads(bytes.fromhex(text))
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS if len(values) < len(ranks) else 0)
        return dict(sorted(values.items()))

    def tell(self, name: str, value: object, seconds: float) -> Any:
        """Returns rank 0's value on all ranks.

        Args:
            name: A name that was not used before.
            value: Rank 0's value; must be picklable.
            seconds: How long other ranks wait for it.

        Raises:
            NotMetError: Rank 0 has said nothing.
        """
        if self._launch.rank == 0:
            self.store.set(name, pickle.dumps(value).hex())
            return value
        try:
            self.store.wait([name], timedelta(seconds=seconds + _GRACE_SECONDS))
        except RuntimeError as error:
            raise NotMetError(
                fail(
                    f"rank 0 has not answered at {self._launch.address}:{self._launch.port}"
                    f" ({name})",
                    "Look at rank 0's output. If it has not started there, another job uses this"
                    " port: set another MASTER_PORT.",
                )
            ) from error
        return pickle.loads(bytes.fromhex(self.store.get(name).decode()))

    def meet(self) -> tuple[dict[int, str], Result]:
        """Waits for all ranks.

        Returns:
            The hosts of the ranks that have come, and the result. The same on all ranks.
        """
        left = max(0.0, self._deadline - time.monotonic())
        ranks = range(self._launch.world_size)
        hosts = self.gather("host", socket.gethostname(), left, ranks)
        hosts = self.tell("hosts", hosts, left)
        return hosts, judge_meeting(self._launch, hosts)

    def close(self, ranks: Collection[int]) -> None:
        """Lets rank 0, with which the store ends, go last.

        Args:
            ranks: The ranks that have come.
        """
        self.gather("closed", None, _GRACE_SECONDS, ranks)


def _await_port(launch: Launch, deadline: float) -> None:
    """Waits until the store's port answers; torch's own message does not say why it does not."""
    while True:
        try:
            socket.create_connection((launch.address, launch.port), _CONNECT_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise NotMetError(judge_contact(launch, error)) from error
        time.sleep(_POLL_SECONDS)


def judge_contact(launch: Launch, error: Exception) -> Result:
    """Judges why the store cannot be reached or served.

    Args:
        launch: The launch of this process.
        error: The last error.
    """
    place = f"{launch.address}:{launch.port}"
    if isinstance(error, ConnectionRefusedError):
        return fail(
            f"nothing listens at {place}",
            "Has rank 0 started, there, and with the same MASTER_PORT? See its output.",
        )
    if isinstance(error, TimeoutError):
        return fail(
            f"{place} does not answer",
            "A firewall or a security group drops what is sent there: open all ports between the"
            " hosts, or set a MASTER_ADDR of an open network.",
        )
    if isinstance(error, socket.gaierror):
        return fail(f"{launch.address} is unknown here", "Set MASTER_ADDR to an IP address.")
    return fail(f"{place}: {error}", "Set a MASTER_ADDR and a MASTER_PORT that all hosts reach.")


def judge_meeting(launch: Launch, hosts: Mapping[int, str]) -> Result:
    """Judges whether all ranks have come.

    Args:
        launch: The launch of this process.
        hosts: The hosts of the ranks that have come.
    """
    missing = sorted(set(range(launch.world_size)) - set(hosts))
    if not missing:
        return ok(f"{len(hosts)} ranks have met; hosts: {shorten(sorted(set(hosts.values())))}")
    per_host = launch.ranks_per_host
    by_host: dict[str, list[str]] = {}
    for rank in missing:
        node = rank // per_host if per_host else -1
        siblings = {host for other, host in hosts.items() if per_host and other // per_host == node}
        unknown = f"host number {node}, of which no rank came" if per_host else "unknown hosts"
        by_host.setdefault(next(iter(siblings), unknown), []).append(str(rank))
    texts = (f"{shorten(ranks)} ({host})" for host, ranks in by_host.items())
    return fail(
        f"{len(hosts)} of {launch.world_size} ranks have met; missing: {'; '.join(texts)}",
        "See what these ranks print. Is the command started on each host, with the same"
        " MASTER_ADDR and MASTER_PORT, and the ports between the hosts open?",
    )


def form_group(meeting: Meeting, run: Run) -> str:
    """Forms the process group of all ranks, and sends something over it.

    Returns:
        The backends.
    """
    backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if run.has_several_hosts and (name := interface.choose_interface(run.launch.address)):
        os.environ.setdefault(interface.VARIABLE, name)  # as the strategies do
    dist.init_process_group(
        backends,
        store=dist.PrefixStore("group", meeting.store),
        rank=run.launch.rank,
        world_size=run.launch.world_size,
        timeout=timedelta(seconds=run.options.seconds),
    )
    ones = torch.ones(1)
    dist.all_reduce(ones)
    if ones.item() != run.launch.world_size:
        raise ValueError(f"the sum of {run.launch.world_size} ones is {ones.item()}")
    return backends


def group_check(meeting: Meeting, seconds: float) -> Check[str]:
    """Returns the check that connects each rank with each other one."""
    return Check(
        "process group",
        lambda run: form_group(meeting, run),
        each(lambda run, backends: ok(f"all ranks are connected: {backends}")),
        "The ranks reach rank 0's port, but not each other's. Open all ports between the hosts, and"
        " set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the interface that joins them.",
        seconds + _GRACE_SECONDS,
    )
