"""A process that was launched by another one ends with it, as long as the two have not met.

Once ranks have met, each knows when one is lost (:mod:`.failures.failure_ring`).
Before that a rank sits in the rendezvous, half an hour by default. The launcher kills it where
another child has failed, but nobody would where the launcher itself is killed, by a SIGTERM too,
which only later ends training as it should. The rank can see that its parent is another one now.
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
    """Lets processes that are started inside know who has launched them.

    Yields:
        Nothing.
    """
    os.environ[_LAUNCHER] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[_LAUNCHER]


@contextmanager
def ending_with_launcher() -> Iterator[None]:
    """Ends this process if the one that launched it is lost meanwhile, or was before.

    Yields:
        Nothing.
    """
    launcher, has_met = os.environ.get(_LAUNCHER), threading.Event()
    if launcher is not None:
        arguments = (int(launcher), has_met)
        threading.Thread(target=_watch, args=arguments, name="launcher-watch", daemon=True).start()
    try:
        yield
    finally:
        has_met.set()


def _watch(launcher: int, has_met: threading.Event) -> None:
    while os.getppid() == launcher:
        if has_met.wait(_POLL_SECONDS):
            return
    print(
        "The process of rank 0 on this host was lost before the ranks had met. Ending this one.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
