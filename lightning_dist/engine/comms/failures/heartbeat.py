"""Distinguish a rank that hangs from one that computes.

A process that is stopped, or whose file system does not answer, closes no connection. So each rank
sends its predecessor a beat every few seconds, with its main thread's activity.

Two states count as a standstill. A *silent* rank sends no beats: it is stopped, its host is gone,
or something holds the interpreter's lock. An *idle* rank sends beats, but uses next to no processor
time, and its main thread waits for something that is no other rank, such as a disk. A standstill is
a message, not a failure, since a rank may go on. Only a silent rank that has not answered for the
run's timeout ends the run. Time is counted in a rank's own wake-ups: a process that was itself
stopped has slept once, so it accuses no other rank when it goes on.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TypeAlias

_PATIENCE_SECONDS = 30.0
_BEATS_IN_PATIENCE = 6
_IDLE_SHARE = 0.1  # of one core; threads of loggers and of gloo use a little

_PACKAGE = __name__.partition(".")[0]
_INSTALLED = tuple(
    os.path.realpath(sysconfig.get_path(name))
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
# A thread waits in these on behalf of their caller.
_WAITS = ("threading", "queue", "concurrent.futures", "contextlib", "selectors")
# In these packages a thread may wait for another rank, but for the modules that use the disk.
_RANKS_MEET_IN = (
    "torch",
    f"{_PACKAGE}.strategies",
    f"{_PACKAGE}.engine.comms",
    f"{_PACKAGE}.engine.data_parallel",
    f"{_PACKAGE}.engine.parallelize",
    f"{_PACKAGE}.engine.pipeline",
    f"{_PACKAGE}.engine.precision",
    f"{_PACKAGE}.engine.sharding",
)
_DISK_IN = ("torch.serialization", "torch.utils", "torch.distributed.checkpoint")


@dataclass(frozen=True, slots=True)
class Rhythm:
    """The interval of beats, and the time limits of standstills."""

    interval_seconds: float
    patience_seconds: float  # after which a standstill is reported
    limit_seconds: float  # after which a silent rank ends the run

    @classmethod
    def for_timeout(cls, timeout_seconds: float) -> Rhythm:
        """Returns the rhythm of a run with this ``timeout_s``."""
        patience = min(_PATIENCE_SECONDS, timeout_seconds / 2)
        return cls(patience / _BEATS_IN_PATIENCE, patience, timeout_seconds)


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process in which a rank runs."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        """Returns the names of rank, process and host."""
        return f"Rank {self.rank} (process {self.pid} on {self.host})"

    def kill_child(self) -> None:
        """Kills the process if it is this one's child; a stopped process does not end by itself."""
        if self.host != socket.gethostname():
            return
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Beat:
    """A message that a rank lives."""

    process: RankProcess
    activity: str


@dataclass(frozen=True, slots=True)
class Standstill:
    """A message that a rank does not go on: it sends no beats, or its main thread waits."""

    process: RankProcess
    activity: str
    seconds: float
    is_silent: bool

    def __str__(self) -> str:
        """Returns a line with the rank and its activity."""
        seconds = f"{self.seconds:.0f} s"
        if self.is_silent:
            return f"{self.process} has not answered for {seconds}. It was {self.activity}"
        idle = f"has been idle for {seconds}, and waits for no other rank"
        return f"{self.process} {idle}. It is {self.activity}"


@dataclass(frozen=True, slots=True)
class Resumption:
    """A message that a rank goes on."""

    process: RankProcess
    seconds: float

    def __str__(self) -> str:
        """Returns a line with the rank."""
        return f"{self.process} goes on after {self.seconds:.0f} s."


Notice: TypeAlias = Standstill | Resumption


class Silence:
    """Counts how long nothing has come from the successor."""

    def __init__(self, rhythm: Rhythm, successor: int) -> None:
        self._rhythm = rhythm
        self._last = Beat(RankProcess(successor, "a host that never answered", 0), "starting.")
        self._seconds = 0.0
        self._is_reported = False

    def heard(self, beat: Beat) -> Resumption | None:
        """Takes a beat, and returns the message to report, or None."""
        seconds, was_reported = self._seconds, self._is_reported
        self._last, self._seconds, self._is_reported = beat, 0.0, False
        return Resumption(beat.process, seconds) if was_reported else None

    def missed(self) -> Standstill | None:
        """Counts an interval in which nothing has come."""
        self._seconds += self._rhythm.interval_seconds
        if self._is_reported or self._seconds < self._rhythm.patience_seconds:
            return None
        self._is_reported = True
        return self.standstill

    @property
    def standstill(self) -> Standstill:
        """The successor's standstill so far."""
        process, activity = self._last.process, self._last.activity
        return Standstill(process, activity, self._seconds, is_silent=True)

    @property
    def is_over(self) -> bool:
        """Whether the run's timeout is over."""
        return self._seconds >= self._rhythm.limit_seconds


class Pulse:
    """Creates the beats of this rank. The watched thread must create it.

    ``progress`` returns a few words on where the run is; another thread calls it.
    """

    def __init__(self, rhythm: Rhythm, process: RankProcess, progress: Callable[[], str]) -> None:
        self._rhythm = rhythm
        self._process = process
        self._progress = progress
        self._thread = threading.get_ident()
        self._processor_seconds = time.process_time()
        self._idle_seconds = 0.0
        self._is_reported = False

    def look(self) -> tuple[Beat, Notice | None]:
        """Inspects the watched thread in each interval; returns a beat, and a message to report."""
        frame = frame_of(self._thread)
        beat = Beat(self._process, f"{self._progress()}, {_place_of(frame)}.")
        used = time.process_time() - self._processor_seconds
        self._processor_seconds += used
        is_idle = used < _IDLE_SHARE * self._rhythm.interval_seconds
        return beat, self._count(beat, is_idle=is_idle and not _may_wait_for_rank(frame))

    def _count(self, beat: Beat, *, is_idle: bool) -> Notice | None:
        if is_idle:
            self._idle_seconds += self._rhythm.interval_seconds
            if self._is_reported or self._idle_seconds < self._rhythm.patience_seconds:
                return None
            self._is_reported = True
            return Standstill(self._process, beat.activity, self._idle_seconds, is_silent=False)
        seconds, was_reported = self._idle_seconds, self._is_reported
        self._idle_seconds, self._is_reported = 0.0, False
        return Resumption(self._process, seconds) if was_reported else None


def frame_of(thread: int) -> FrameType | None:
    """Returns the frame that the thread of a ``get_ident()`` is in; None if there is none."""
    # CPython up to 3.11 lists the frames under a lock that a thread needs to start or to end. A
    # garbage collection meanwhile lets such a thread in, and both wait forever (cpython #106883).
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if collects:
            gc.enable()


def _may_wait_for_rank(frame: FrameType | None) -> bool:
    """Returns whether an idle thread may be waiting for another rank."""
    if frame is None:
        return False
    for caller, _ in traceback.walk_stack(frame):
        name: str = caller.f_globals.get("__name__", "")
        if not _is_in(name, _WAITS):
            return _is_in(name, _RANKS_MEET_IN) and not _is_in(name, _DISK_IN)
    return False


def _place_of(frame: FrameType | None) -> str:
    """Names a thread's innermost function, and the innermost one of the user's code."""
    if frame is None:
        return "which has ended"
    users = next((caller for caller, _ in traceback.walk_stack(frame) if _is_users(caller)), frame)
    return _described(frame) + ("" if users is frame else f", called {_described(users)}")


def _is_in(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _is_users(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    is_ours = _is_in(frame.f_globals.get("__name__", ""), (_PACKAGE,))
    return not (is_ours or path.startswith("<") or os.path.realpath(path).startswith(_INSTALLED))


def _described(frame: FrameType) -> str:
    return f"in `{frame.f_code.co_name}` ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
