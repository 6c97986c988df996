"""Where another thread is."""

from __future__ import annotations

import gc
import sys
from types import FrameType


def frame_of(thread: int) -> FrameType | None:
    """Returns the frame that a thread is in; None if there is no such thread.

    Args:
        thread: Its ``threading.get_ident()``.
    """
    # CPython up to 3.11 lists the frames under a lock that a thread needs to start or to end. A
    # garbage collection meanwhile lets such a thread in, and both wait forever (cpython #106883).
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if collects:
            gc.enable()
