"""Connects to the store at which ranks meet, and explains why that fails.

torch waits for the whole timeout, wherever an address leads. So the port is tried first, then the
store behind it. Each failure says what was found there, and what to change.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

EARLY_SECONDS = 20.0  # until an address, or a first rank, that does not answer is given up
_HANDSHAKE_SECONDS = 10.0
_PROBE_SECONDS = 3.0
_POLL_SECONDS = 0.05


class ContactError(ValueError):
    """An address and a port lead to no store: what was found, and what to change."""

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(f"{found}. {remedy}")
        self.found = found
        self.remedy = remedy


def await_port(address: str, port: int, seconds: float) -> None:
    """Waits until a port answers.

    An unknown name, or an address that does not answer at all, is given up earlier.

    Raises:
        ContactError: The port has not answered.
    """
    begin, is_told = time.monotonic(), False
    while True:
        try:
            socket.create_connection((address, port), _PROBE_SECONDS).close()
            return
        except OSError as error:
            passed = time.monotonic() - begin
            # Where nothing listens, the first rank may still be starting.
            is_refused = isinstance(error, ConnectionRefusedError)
            if passed > (seconds if is_refused else min(seconds, EARLY_SECONDS)):
                raise ContactError(*explain_contact(address, port, error)) from error
            if is_refused and passed > EARLY_SECONDS and not is_told:
                is_told = True
                why = ContactError(*explain_contact(address, port, error))
                tell(f"After {passed:.0f} s {why} Waiting up to {seconds:g} s.")
        time.sleep(_POLL_SECONDS)


def explain_contact(address: str, port: int, error: Exception) -> tuple[str, str]:
    """Explains why a store cannot be reached: what was found, and what to do."""
    place = f"MASTER_ADDR={address}, MASTER_PORT={port}"
    if isinstance(error, ConnectionRefusedError):
        return (
            f"nothing listens at {place}",
            "Has rank 0 started, there, and with the same MASTER_PORT? See its output.",
        )
    if isinstance(error, TimeoutError):
        return (
            f"{place} does not answer",
            "Is that host up? A firewall or a security group may drop what is sent there: open all"
            " ports between the hosts, or set a MASTER_ADDR of an open network.",
        )
    if isinstance(error, socket.gaierror):
        return (
            f"the name MASTER_ADDR={address} is unknown on host {socket.gethostname()}",
            "Set MASTER_ADDR to the IP address of rank 0's host, or add its name to /etc/hosts.",
        )
    return f"{place}: {error}", "Set a MASTER_ADDR and a MASTER_PORT that all hosts reach."


def errno_of_serving(port: int) -> int:
    """Returns the error number of listening at a port of this host; 0 if it is free."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("", port))
        except OSError as error:
            return error.errno or errno.EINVAL
    return 0


def explain_serving(port: int, error: int) -> tuple[str, str]:
    """Explains why a port cannot be served: what was found, and what to do."""
    if error == errno.EADDRINUSE:
        return (
            f"MASTER_PORT={port} is taken by another process on host {socket.gethostname()}",
            "Another run, or what is left of one? Set another MASTER_PORT on all hosts, or end that"
            f" process: `ss -ltnp sport = :{port}` names it.",
        )
    return f"MASTER_PORT={port}: {os.strerror(error)}", "Set MASTER_PORT above 1023."


def open_store(address: str, port: int, *, is_master: bool) -> dist.TCPStore:
    """Connects to a store, or serves it.

    Raises:
        ContactError: This process cannot listen at the port, or another one does that is no store.
    """
    opened: list[dist.TCPStore | RuntimeError] = []

    def connect() -> None:
        try:
            store = dist.TCPStore(
                address,
                port,
                is_master=is_master,
                wait_for_workers=False,
                timeout=timedelta(seconds=_HANDSHAKE_SECONDS),
                multi_tenant=True,  # as in torch: a process may form several groups in turn
            )
            opened.append(store)
        except RuntimeError as error:
            opened.append(error)

    # Torch tries for up to twice as long, and without limit where a process says nothing.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_HANDSHAKE_SECONDS + _PROBE_SECONDS)
    found = opened[0] if opened else None
    if isinstance(found, dist.TCPStore):
        return found
    if not is_master:
        raise ContactError(
            f"the process at MASTER_ADDR={address}, MASTER_PORT={port} is no run's first rank: it"
            " does not answer as a store",
            "Set another MASTER_PORT on all hosts.",
        ) from found
    if found is not None and (number := errno_of_serving(port)):
        raise ContactError(*explain_serving(port, number)) from found
    raise ContactError(
        f"rank 0 serves MASTER_PORT={port} on host {socket.gethostname()}, and cannot reach it at"
        f" MASTER_ADDR={address}",
        "Set MASTER_ADDR to an address of rank 0's host, and NODE_RANK=0 on that host.",
    ) from found


def tell(text: str) -> None:
    """Prints why this process waits."""
    print(f"lightning_dist: {text}", file=sys.stderr, flush=True)
