"""End a process whose main thread cannot be woken.

A rank that learns of a failure normally raises where it waits for its pipeline neighbour. A thread
inside of a collective or of the user's own code cannot be interrupted; after a grace the process
prints the true cause and exits, rather than wait for the process group's timeout.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from lightning_dist.strategies.failure_ring import Failure

_GRACE_SECONDS = 6.0
_POLL_SECONDS = 0.1


def exit_after_grace(failure: Failure, has_left: Callable[[], bool]) -> None:
    """Ends the process after a grace, unless its run has ended by then.

    Args:
        failure: What to print.
        has_left: Whether the run has ended by itself.
    """
    thread = threading.Thread(
        target=_wait_and_exit, args=(failure, has_left), name="last-resort", daemon=True
    )
    thread.start()


def _wait_and_exit(failure: Failure, has_left: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline:
        if has_left():
            return
        time.sleep(_POLL_SECONDS)
    text = "".join(traceback.format_exception(failure.to_exception()))
    print(f"{text}Ending this process.", file=sys.stderr, flush=True)
    os._exit(1)
