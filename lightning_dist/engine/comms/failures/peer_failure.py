"""Report one rank's failure to all ranks, at once and with the true cause.

Else the others would sit in a receive until the process group's timeout, and report the timeout. So
each rank has a thread that waits for messages from its successor. A rank that raises sends its
traceback to its predecessor, which passes it on around the ring. If a rank is killed, the kernel
closes its connection, which its predecessor sees within milliseconds. So the report of a lost rank
needs nothing of that rank. Beats and standstills (:mod:`.failures.heartbeat`) go the same way.

A rank raises a failure where it waits for a pipeline neighbour. A main thread in a collective or in
the user's code cannot be interrupted: after a grace period its process prints the cause and exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_dist.engine.comms.channel import ChannelClosedError, PeerLostError
from lightning_dist.engine.comms.failures.heartbeat import (
    Beat,
    Notice,
    Pulse,
    RankProcess,
    Rhythm,
    Silence,
    Standstill,
    frame_of,
)
from lightning_dist.engine.comms.gloo_channel import DistributedReceiver, DistributedSender

_CLOSE_SECONDS = 2.0


class RankFailedError(RuntimeError):
    """Another rank has failed first."""


class RemoteTraceback(Exception):  # noqa: N818  (it is the text of one)
    """The traceback of another process, printed before the error that it caused."""

    def __str__(self) -> str:
        """Returns the text on lines of its own."""
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure that ends a run."""

    rank: int  # that failed first
    summary: str
    details: str = ""  # the traceback, if there is one
    is_value_error: bool = False  # of the user's, so that all ranks raise the same error
    unanswering: RankProcess | None = None  # the rank's process, if it has stopped answering

    @classmethod
    def from_exception(cls, rank: int, error: BaseException) -> Failure:
        """Creates the failure of an exception in this process."""
        summary = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
        details = "".join(traceback.format_exception(error))
        return cls(rank, summary, details, isinstance(error, ValueError))

    @classmethod
    def from_standstill(cls, standstill: Standstill, details: str = "") -> Failure:
        """Creates the failure of a rank that all others have waited for in vain."""
        process = standstill.process
        unanswering = process if standstill.is_silent else None
        return cls(process.rank, str(standstill), details, unanswering=unanswering)

    def __str__(self) -> str:
        """Returns a line with the failed rank and the cause."""
        return f"Rank {self.rank} failed first: {self.summary}"

    def to_exception(self) -> Exception:
        """Creates the exception that the other ranks raise."""
        if self.is_value_error:
            said = self.summary.partition(": ")[2] or self.summary  # without the class
            return ValueError(f"{said}\n(raised on rank {self.rank})")
        error = RankFailedError(str(self))
        if self.details:
            error.__cause__ = RemoteTraceback(self.details)
        return error


class FailureRing:
    """One rank's place in the ring, on a gloo group whose timeout is never reached.

    The training thread must create it. Threads of the ring call the functions: ``progress`` returns
    a few words on where this rank's run is. ``on_failure`` is called once, with another rank's
    failure. ``on_notice`` is called when a rank stands still or goes on. Rank 0 gets all notices;
    another rank gets those on rank 0 that it was the first to find.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        world_size: int,
        rhythm: Rhythm,
        progress: Callable[[], str],
        on_failure: Callable[[Failure], None],
        on_notice: Callable[[Notice], None],
    ) -> None:
        self._rank = rank
        self._predecessor = (rank - 1) % world_size
        self._successor = (rank + 1) % world_size
        self._rhythm = rhythm
        self._on_failure = on_failure
        self._on_notice = on_notice
        self._failure: Failure | None = None
        self._has_said_goodbye = False
        self._lock = threading.Lock()
        self._standstills: dict[int, Standstill] = {}
        self._silence = Silence(rhythm, self._successor)
        own = RankProcess(rank, socket.gethostname(), os.getpid())
        self._pulse = Pulse(rhythm, own, progress)
        self._sending = threading.Lock()  # two threads and the trainer's send
        self._sender = DistributedSender(group, self._predecessor)
        self._receiver = DistributedReceiver(
            group,
            self._successor,
            torch.device("cpu"),
            timeout_seconds=rhythm.interval_seconds,
            cause_seconds=0.0,
        )
        self._is_closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._listen, name="failure-ring", daemon=True),
            threading.Thread(target=self._beat, name="heartbeat", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def standstill(self) -> Standstill | None:
        """The standstill of a rank, the first one of several; None if there is none."""
        return next(iter(self._standstills.copy().values()), None)

    def announce(self, failure: Failure) -> None:
        """Sends a failure to the other ranks, unless an earlier failure is known."""
        if self._is_first(failure):
            self._send(failure)
            self._say_goodbye()

    def close(self) -> None:
        """Sends a goodbye, so that this rank's exit is not taken for a failure."""
        self._say_goodbye()
        self._receiver.close()
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)

    def _listen(self) -> None:
        try:
            while True:
                self._listen_once()
        except ChannelClosedError:
            return  # goodbye
        except PeerLostError:
            lost = f"the process of rank {self._successor} was lost (its connection closed)"
            self._learn(Failure(self._successor, lost))

    def _listen_once(self) -> None:
        try:
            message: Beat | Notice | Failure = self._receiver.receive()
        except TimeoutError:
            self._pass_on(self._silence.missed(), is_first=True)
            if self._silence.is_over:
                self._learn(Failure.from_standstill(self._silence.standstill))
            return
        if isinstance(message, Failure):
            self._learn(message)
        elif isinstance(message, Beat):
            self._pass_on(self._silence.heard(message), is_first=True)
        else:
            self._pass_on(message, is_first=False)

    def _learn(self, failure: Failure) -> None:
        if not self._is_first(failure):
            return
        if failure.rank != self._predecessor:
            self._send(failure)
        self._on_failure(failure)
        # Not in `close`: this rank may sit in a collective that only the predecessor's end can
        # break, and the predecessor does not end before it has received a goodbye.
        self._say_goodbye()

    def _is_first(self, failure: Failure) -> bool:
        with self._lock:
            is_first = self._failure is None
            self._failure = self._failure or failure
        return is_first

    def _beat(self) -> None:
        while not self._is_closed.is_set():
            beat, notice = self._pulse.look()
            self._send(beat)
            self._pass_on(notice, is_first=True)
            self._is_closed.wait(self._rhythm.interval_seconds)

    def _pass_on(self, notice: Notice | None, *, is_first: bool) -> None:
        if notice is None:
            return
        rank = notice.process.rank
        if isinstance(notice, Standstill):
            self._standstills[rank] = notice
        else:
            self._standstills.pop(rank, None)
        if self._rank == 0 or (rank == 0 and is_first):
            self._on_notice(notice)
        if rank != self._predecessor:
            self._send(notice)

    def _say_goodbye(self) -> None:
        self._is_closed.set()
        with self._sending:
            said, self._has_said_goodbye = self._has_said_goodbye, True
            if not said:
                self._sender.close()

    def _send(self, message: Beat | Notice | Failure) -> None:
        with self._sending, contextlib.suppress(PeerLostError):  # a dead predecessor needs no news
            if not self._has_said_goodbye:
                self._sender.send(message)


GRACE_SECONDS = 6.0
_POLL_SECONDS = 0.1


def exit_after_grace(failure: Failure, has_left: Callable[[], bool]) -> None:
    """Ends the process after a grace period, unless its run has ended by then."""

    def wait_and_exit() -> None:
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            if has_left():
                return
            time.sleep(_POLL_SECONDS)
        text = "".join(traceback.format_exception(failure.to_exception()))
        print(f"{text}Ending this process, which is here:", file=sys.stderr)
        frame = frame_of(threading.main_thread().ident or 0)
        print("".join(traceback.format_stack(frame)), file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=wait_and_exit, name="last-resort", daemon=True).start()


def never_destroy(objects: Iterable[Any]) -> None:
    """Keeps process groups, whose destructors would wait for ranks, until the process ends."""
    for kept in objects:
        # One reference that is never released. Python releases every other one while it exits,
        # those of modules and of frames too.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
