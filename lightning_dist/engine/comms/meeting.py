"""The store at which all ranks meet, before they form a process group.

Torch would wait for as long as a run waits, wherever the address leads, and would name no rank that
is missing. So the address is tried first. Then each rank reports to the first one, which judges for
all: all ranks raise the same error.

The agents of torchrun keep one store for all attempts, so a second attempt would find the addresses
of processes that have ended, and no environment variable distinguishes attempts. So the first rank
names the attempt, and each other rank asks for the name with a token that no process of an earlier
attempt can have used. Agents end all processes of an attempt before they begin another one.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn
from uuid import uuid4

import torch.distributed as dist

from lightning_dist.engine.common.names import shorten
from lightning_dist.engine.comms.contact import (
    EARLY_SECONDS,
    ContactError,
    await_port,
    open_store,
    tell,
)

_FAREWELL_SECONDS = 3.0  # the store ends with the first rank
_POLL_SECONDS = 0.001
_LONGEST_POLL_SECONDS = 0.2
_LONGEST_LEADER_POLL_SECONDS = 0.01
_FIRST, _ASKED = "lightning_dist/first", "lightning_dist/asked"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where and with how many ranks this rank meets."""

    address: str
    port: int
    rank: int
    world_size: int
    ranks_per_host: int  # 0 if it is not known
    timeout_seconds: float  # how long ranks wait for each other, here and later
    serves: bool  # whether the first rank serves the store, or else the launcher does


def launcher_serves() -> bool:
    """Returns whether the launcher keeps one store for all attempts, as ``torchrun`` announces."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def meet(meeting: Meeting) -> dist.Store:
    """Returns this attempt's store, where all ranks have come. Collective: every rank must call it.

    Raises:
        ValueError: The address leads to no store, or to that of another run, the port is taken, or
            the ranks do not fit each other.
        ConnectionError: The first rank was lost.
        TimeoutError: Ranks have not come in time.
    """
    if meeting.world_size == 1:
        return dist.HashStore()
    if meeting.rank > 0 or not meeting.serves:
        seconds = meeting.timeout_seconds if meeting.serves else EARLY_SECONDS
        await_port(meeting.address, meeting.port, seconds)
    is_master = meeting.rank == 0 and meeting.serves
    store = open_store(meeting.address, meeting.port, is_master=is_master)
    store.set_timeout(timedelta(seconds=meeting.timeout_seconds))
    return join(store, meeting)


def join(store: dist.Store, meeting: Meeting) -> dist.PrefixStore:
    """Returns this attempt's part of a store, which may hold entries of earlier ones; as `meet`."""
    leads = meeting.rank == 0
    if leads and meeting.serves:
        own = f"process {os.getpid()} of host {socket.gethostname()}"
        leads = store.compare_set(_FIRST, "", own).decode() == own
    return _lead(store, meeting) if leads else _follow(store, meeting)


def _lead(store: dist.Store, meeting: Meeting) -> dist.PrefixStore:
    name = f"lightning_dist/attempt/{uuid4().hex}"
    attempt = dist.PrefixStore(name, store)
    attempt.set(_host(0), _entry(uuid4().hex))
    answer = json.dumps([name, meeting.world_size, socket.gethostname()])
    begin, is_told, read, faults = time.monotonic(), False, set[int](), ""
    pause = _POLL_SECONDS
    while not faults and attempt.add("came", 0) < meeting.world_size - 1:
        for index in set(range(1, store.add(_ASKED, 0) + 1)) - read:
            # It may be of a process that has ended. Then the answer is unused.
            if store.check([f"{_ASKED}/{index}"]):
                store.set(_answer(store.get(f"{_ASKED}/{index}").decode()), answer)
                read.add(index)
        passed = time.monotonic() - begin
        if attempt.check(["fault"]):
            faults = attempt.get("fault").decode()
        elif passed > meeting.timeout_seconds:
            faults = f"{_describe_missing(attempt, meeting)} within {meeting.timeout_seconds:g} s."
        elif passed > EARLY_SECONDS and not is_told:
            is_told = True
            tell(
                f"{_describe_missing(attempt, meeting)} after {passed:.0f} s. Waiting up to"
                f" {meeting.timeout_seconds:g} s. {MISSING_REMEDY}"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_LEADER_POLL_SECONDS)
    attempt.set("verdict", faults)
    if faults:
        _await(lambda: attempt.add("heard", 0) >= attempt.add("asked", 0), _FAREWELL_SECONDS)
        _refuse(faults)
    return attempt


def _follow(store: dist.Store, meeting: Meeting) -> dist.PrefixStore:
    token, rank = uuid4().hex, meeting.rank
    # A first rank that serves the store is there.
    patience = min(meeting.timeout_seconds, EARLY_SECONDS if meeting.serves else math.inf)
    try:
        store.set(f"{_ASKED}/{store.add(_ASKED, 1)}", token)
        if not _await(lambda: store.check([_answer(token)]), patience):
            raise ContactError(
                f"rank 0 has not answered rank {rank} at MASTER_ADDR={meeting.address},"
                f" MASTER_PORT={meeting.port} within {patience:g} s",
                "A run that has begun uses this port, or rank 0 was lost: see its output, or set"
                " another MASTER_PORT on all hosts.",
            )
        name, world_size, host = json.loads(store.get(_answer(token)))
        attempt = dist.PrefixStore(name, store)
        attempt.add("asked", 1)
        own = _entry(token)
        found = attempt.compare_set(_host(rank), "", own).decode()
        if found != own:
            attempt.set(
                "fault",
                f"Two processes are rank {rank}, on the hosts {json.loads(found)[0]} and"
                f" {socket.gethostname()}: is it the same NODE_RANK on both, or do two runs use"
                f" MASTER_PORT={meeting.port}? Set NODE_RANK=0, 1, ... and a MASTER_PORT for each"
                " run.",
            )
        elif world_size != meeting.world_size:
            attempt.set(
                "fault",
                f"Rank {rank} on host {socket.gethostname()} counts {meeting.world_size} ranks, and"
                f" rank 0 on host {host} counts {world_size}. Give the Trainer the same `devices`"
                " and `num_nodes` on all hosts.",
            )
        else:
            attempt.add("came", 1)
        patience = meeting.timeout_seconds + _FAREWELL_SECONDS
        if not _await(lambda: attempt.check(["verdict"]), patience):
            raise TimeoutError(f"Rank 0 has not begun within {patience:g} s. See its output.")
        faults = attempt.get("verdict").decode()
    except dist.DistError as error:
        raise ConnectionError(
            f"Rank {rank} has lost rank 0 before the ranks had met. See rank 0's output."
        ) from error
    if faults:
        with suppress(dist.DistError):
            attempt.add("heard", 1)
        _refuse(faults)
    return attempt


MISSING_REMEDY = (
    "See what these ranks print. Is the script started on each host, with the same MASTER_ADDR and"
    " MASTER_PORT, and the ports between the hosts open?"
)


def describe_missing(world_size: int, hosts: Mapping[int, str], ranks_per_host: int) -> str:
    """Describes how many ranks have met, and which have not, by the hosts of those that have."""
    by_host: dict[str, list[str]] = {}
    for rank in sorted(set(range(world_size)) - set(hosts)):
        found = "unknown hosts"
        if ranks_per_host:
            node = rank // ranks_per_host
            siblings = (host for r, host in hosts.items() if r // ranks_per_host == node)
            found = next(siblings, f"host number {node}, of which no rank came")
        by_host.setdefault(found, []).append(str(rank))
    texts = (f"{shorten(ranks)} ({host})" for host, ranks in by_host.items())
    return f"{len(hosts)} of {world_size} ranks have met; missing: {'; '.join(texts)}"


def _describe_missing(attempt: dist.Store, meeting: Meeting) -> str:
    ranks = (rank for rank in range(meeting.world_size) if attempt.check([_host(rank)]))
    hosts = {rank: json.loads(attempt.get(_host(rank)))[0] for rank in ranks}
    return describe_missing(meeting.world_size, hosts, meeting.ranks_per_host)


def _refuse(faults: str) -> NoReturn:
    if "missing:" in faults:
        raise TimeoutError(f"{faults} {MISSING_REMEDY}")
    raise ValueError(faults)


def _await(is_done: Callable[[], bool], seconds: float) -> bool:
    """Returns whether something is so within some seconds; asks more and more seldom."""
    deadline, pause = time.monotonic() + seconds, _POLL_SECONDS
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_SECONDS)
    return True


def _host(rank: int) -> str:
    return f"host/{rank}"


def _entry(token: str) -> str:
    return json.dumps([socket.gethostname(), token])


def _answer(token: str) -> str:
    return f"lightning_dist/answer/{token}"
