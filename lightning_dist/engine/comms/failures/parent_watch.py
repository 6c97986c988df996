"""End a launched process when its launcher is lost before the ranks have met.

Once ranks have met, each knows when another is lost (:mod:`.failures.peer_failure`). Before that a
rank sits in the rendezvous, half an hour by default. If another child fails, the launcher kills the
rank. If the launcher itself is killed (by SIGTERM too, which ends a training in order only later),
nothing would kill the rank. So the rank looks whether the launcher is still there. The launcher is
not its parent where the script trains in another process (``multiprocessing``).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LAUNCHER = "LIGHTNING_DIST_LAUNCHER"  # "ID:start", since a later process may get the same ID
_POLL_SECONDS = 0.5


@contextmanager
def known_to_children() -> Iterator[None]:
    """Names this process to the child processes that are started inside."""
    os.environ[_LAUNCHER] = f"{os.getpid()}:{_start_time(str(os.getpid()))}"
    try:
        yield
    finally:
        del os.environ[_LAUNCHER]


@contextmanager
def ending_with_launcher() -> Iterator[None]:
    """Ends this process if its launcher is lost meanwhile, or was before."""
    launcher, has_met = os.environ.get(_LAUNCHER), threading.Event()
    pid, _, start = (launcher or "").partition(":")

    def watch() -> None:
        while _start_time(pid) == start:
            if has_met.wait(_POLL_SECONDS):
                return
        lost = "The process of rank 0 on this host was lost before the ranks had met."
        print(f"{lost} Ending this one.", file=sys.stderr, flush=True)
        os._exit(1)

    if launcher is not None:
        threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
    try:
        yield
    finally:
        has_met.set()


def _start_time(pid: str) -> str:
    """Returns when a process has started, "" of one that has ended, or without Linux's files."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]
