"""End a process in which a thread waits for a rank that will never answer.

A rank that learns of a failure normally raises where it waits for its pipeline neighbour. A main
thread inside of a collective or of the user's own code cannot be interrupted; after a grace the
process prints the true cause and exits, rather than wait for the process group's timeout.

Nor can the threads that gloo keeps for asynchronous collectives. A process group joins them when it
is destroyed, at the latest while Python exits, and survivors of a failure may each wait for the
other's connection to close. So after a failure the groups are never destroyed.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from lightning_dist.engine.comms.failures.failure_ring import Failure

GRACE_SECONDS = 6.0
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
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        if has_left():
            return
        time.sleep(_POLL_SECONDS)
    text = "".join(traceback.format_exception(failure.to_exception()))
    print(f"{text}Ending this process, which is here:", file=sys.stderr)
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    print("".join(traceback.format_stack(frame)), file=sys.stderr, flush=True)
    os._exit(1)


def never_destroy(objects: Iterable[Any]) -> None:
    """Keeps objects alive until the process has ended.

    Args:
        objects: Process groups, whose destructors would wait for other ranks.
    """
    for kept in objects:
        # One reference that nobody gives back. Python lets go of every other one while it exits,
        # those of modules and of frames too.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
