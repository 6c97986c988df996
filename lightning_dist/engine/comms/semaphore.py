"""A semaphore in memory that processes share.

Python's own are for processes of which one has started the other. The system's are in any memory
that both see. Posting and taking what has been posted are a few instructions; only who has to wait,
and who wakes somebody, asks the system.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time

SEMAPHORE_BYTES = 64
"""Room of one: a cache line, of which the system's C library needs half."""

# Of the C library's real-time clock, which may be set while somebody waits.
_LONGEST_WAIT_SECONDS = 1.0


class _Moment(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Semaphore:
    """A count of what is there to be taken.

    Args:
        memory: Shared.
        offset: Where it is; a multiple of :data:`SEMAPHORE_BYTES`.
    """

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        # Keeps the interpreter's lock, for what never waits: who gives it up may have to wait long
        # until another thread gives it back.
        self._quick = ctypes.PyDLL(None)
        self._place = ctypes.byref((ctypes.c_char * SEMAPHORE_BYTES).from_buffer(memory, offset))

    def begin(self, count: int) -> None:
        """Makes it a semaphore; one of the processes must, before any uses it.

        Args:
            count: What is there.

        Raises:
            OSError: The system has none between processes.
        """
        if self._library.sem_init(self._place, 1, count):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def post(self) -> None:
        """Adds one."""
        self._quick.sem_post(self._place)

    def try_wait(self) -> bool:
        """Takes one if there is any, and tells whether there was."""
        return bool(self._quick.sem_trywait(self._place) == 0)

    def wait(self, timeout_seconds: float | None) -> bool:
        """Waits for one and takes it.

        Args:
            timeout_seconds: How long; None waits for ever.

        Returns:
            Whether one came in time.
        """
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not self.try_wait():
            left = _LONGEST_WAIT_SECONDS if end is None else end - time.monotonic()
            if left <= 0:
                return False
            if self._wait_once(min(left, _LONGEST_WAIT_SECONDS)):
                return True
        return True

    def _wait_once(self, seconds: float) -> bool:
        until = time.time() + seconds
        moment = _Moment(int(until), int(until % 1 * 1e9))
        if self._library.sem_timedwait(self._place, ctypes.byref(moment)) == 0:
            return True
        code = ctypes.get_errno()
        assert code in (errno.ETIMEDOUT, errno.EINTR), os.strerror(code)
        return False
