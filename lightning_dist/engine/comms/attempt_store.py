"""The store in which the processes of one attempt meet, where a launcher may start them again.

The agents of torchrun keep one store for all attempts, and the processes that they start use it.
So a second attempt would find the addresses of processes that have ended. No variable of the
environment tells attempts apart: ``TORCHELASTIC_RESTART_COUNT`` counts the failures of one host.

So the first rank names the attempt. Every other rank asks for the name with a token of its own, to
which no process of an earlier attempt can have got an answer. Agents end all processes of an
attempt before they begin another one.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

_POLL_SECONDS = 0.01


def is_shared_by_attempts() -> bool:
    """Tells whether the launcher keeps one store for all attempts; ``torchrun`` says so."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def connect(
    address: str, port: int, rank: int, world_size: int, timeout: timedelta
) -> dist.PrefixStore:
    """Returns the part of a launcher's store that is this attempt's. Collective.

    Args:
        address: Of the launcher's store.
        port: Of the launcher's store.
        rank: This rank.
        world_size: All ranks.
        timeout: How long a rank waits for another, here and later.
    """
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return dist.PrefixStore(agree_on_attempt(store, rank, world_size, timeout), store)


def agree_on_attempt(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Returns a name that this attempt alone has, the same on all ranks. Collective.

    Args:
        store: May hold what earlier attempts have left.
        rank: This rank.
        world_size: All ranks.
        timeout: How long the first rank waits for the others.

    Raises:
        TimeoutError: Ranks have not come.
    """
    if rank == 0:
        return _name_attempt(store, world_size, timeout)
    token = uuid4().hex
    store.set(_key(rank), token)
    name = store.get(_answer(token)).decode()
    store.set(_key(rank), name)  # the first rank need not answer again
    return name


def _name_attempt(store: dist.Store, world_size: int, timeout: timedelta) -> str:
    name = f"lightning_dist/attempt/{uuid4().hex}"
    deadline = time.monotonic() + timeout.total_seconds()
    waiting = {rank: "" for rank in range(1, world_size)}  # what each has asked with so far
    while waiting:
        for rank, known in list(waiting.items()):
            asked = store.get(_key(rank)).decode() if store.check([_key(rank)]) else ""
            if asked == name:
                del waiting[rank]
            elif asked != known:
                # Of a process that has ended, maybe: then the answer is for nothing.
                store.set(_answer(asked), name)
                waiting[rank] = asked
        if waiting and time.monotonic() > deadline:
            raise TimeoutError(
                f"The ranks {list(waiting)} have not met rank 0 within"
                f" {timeout.total_seconds():g} s."
            )
        time.sleep(_POLL_SECONDS if waiting else 0.0)
    return name


def _key(rank: int) -> str:
    return f"lightning_dist/attempts/rank/{rank}"


def _answer(token: str) -> str:
    return f"lightning_dist/attempts/answer/{token}"
