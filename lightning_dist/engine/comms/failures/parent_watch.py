"""End a launched process when its launcher is lost before the ranks have met.

Once ranks have met, each knows when another is lost (:mod:`.failures.peer_failure`). Before that a
rank sits in the rendezvous, half an hour by default. If another child fails, the launcher kills the
rank. If the launcher itself is killed (by SIGTERM too, which ends a training in order only later),
nothing would kill the rank. But the rank can see that it has another parent process now.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LAUNCHER = "LIGHTNING_DIST_LAUNCHER"  # its process ID: a parent may be a shell or an agent, too
_POLL_SECONDS = 0.5


@contextmanager
def known_to_children() -> Iterator[None]:
    """Passes this process's ID to the child processes that are started inside."""
    os.environ[_LAUNCHER] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[_LAUNCHER]


@contextmanager
def ending_with_launcher() -> Iterator[None]:
    """Ends this process if its launcher is lost meanwhile, or was before."""
    launcher, has_met = os.environ.get(_LAUNCHER), threading.Event()

    def watch() -> None:
        while str(os.getppid()) == launcher:
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
