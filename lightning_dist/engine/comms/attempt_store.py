"""The store in which the processes of one attempt meet, if a launcher may restart processes.

The agents of torchrun keep one store for all attempts, so a second attempt would find the addresses
of processes that have ended. No environment variable distinguishes attempts. So the first rank
names the attempt, and every other rank asks for the name with a token that no process of an earlier
attempt can have used. Agents end all processes of an attempt before they begin another one.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

_POLL_SECONDS = 0.01
_CONNECT_SECONDS = 15.0  # torch tries for up to twice as long


def is_shared_by_attempts() -> bool:
    """Returns whether the launcher keeps one store for all attempts, as ``torchrun`` announces."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def connect(
    address: str, port: int, rank: int, world_size: int, timeout: timedelta
) -> dist.PrefixStore:
    """Returns this attempt's part of a launcher's store. Collective: every rank must call it.

    Args:
        address: Address of the launcher's store.
        port: Port of the launcher's store.
        rank: This rank.
        world_size: Number of all ranks.
        timeout: How long a rank waits for another, here and later.

    Raises:
        ConnectionError: The store does not answer. It has been there before this process.
    """
    patience = min(timeout, timedelta(seconds=_CONNECT_SECONDS))
    try:
        store = dist.TCPStore(
            address, port, is_master=False, wait_for_workers=False, timeout=patience
        )
    except RuntimeError as error:
        raise ConnectionError(
            f"The launcher's store at {address}:{port} does not answer: its process was lost, or"
            " this host cannot reach that address."
        ) from error
    store.set_timeout(timeout)
    return dist.PrefixStore(agree_on_attempt(store, rank, world_size, timeout), store)


def agree_on_attempt(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Returns the unique name of this attempt, the same on all ranks. Collective.

    Args:
        store: The launcher's store; it may hold entries of earlier attempts.
        rank: This rank.
        world_size: Number of all ranks.
        timeout: How long the first rank waits for the others.

    Raises:
        TimeoutError: Ranks have not asked in time.
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
    waiting = {rank: "" for rank in range(1, world_size)}  # the latest token of each rank
    while waiting:
        for rank, known in list(waiting.items()):
            asked = store.get(_key(rank)).decode() if store.check([_key(rank)]) else ""
            if asked == name:
                del waiting[rank]
            elif asked != known:
                # The token may be of a process that has ended. Then the answer is unused.
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
