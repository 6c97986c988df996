"""Bring faults about in processes that say, through a pipe, which phase they have begun."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from tests.faults.case import ALL, LAUNCHER, Fault
from tests.helpers.hosts.cluster import Host

_POLL_SECONDS = 0.02
_BLOCK = b"\0" * 4096


class Injector:
    """Waits for phases, and brings faults about some time later, on a thread of its own.

    Args:
        pipe: Where to make the pipe.
        faults: What shall go wrong; a rank raises by itself.
        launcher: Returns the process ID of the launcher.
        filler: A file that takes what is left of a disk.
        hosts: The host of each rank, if they have one each.

    Attributes:
        pids: The process of each rank that has started.
        hits: For each fault that has come, when, and the phase that its target was in.
    """

    def __init__(
        self,
        pipe: Path,
        faults: Sequence[Fault],
        launcher: Callable[[], int],
        filler: Path,
        hosts: Sequence[Host] = (),
    ) -> None:
        os.mkfifo(pipe)
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # so it never is at an end
        self._waiting = list(faults)
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._launcher = launcher
        self._filler = filler
        self._hosts = hosts
        self._phases: dict[int, str] = {}
        self._is_over = threading.Event()
        self.pids: dict[int, int] = {}
        self.hits: dict[Fault, tuple[float, str]] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        os.close(self._pipe)
        self._filler.unlink(missing_ok=True)

    def _run(self) -> None:
        rest = ""
        while not self._is_over.is_set():
            now = time.monotonic()
            for at, action in [due for due in self._due if due[0] <= now]:
                self._due.remove((at, action))
                action()
            next_due = min((at for at, _ in self._due), default=now + _POLL_SECONDS)
            patience = min(max(next_due - time.monotonic(), 0.0), _POLL_SECONDS)
            if not select.select([self._pipe], [], [], patience)[0]:
                continue
            *lines, rest = (rest + os.read(self._pipe, 65536).decode()).split("\n")
            for line in lines:
                rank, pid, phase, count = line.split()
                self._has_begun(int(rank), int(pid), phase, int(count))

    def _has_begun(self, rank: int, pid: int, phase: str, count: int) -> None:
        # A rank raises by itself, and says so.
        is_raised = phase.startswith("raise_in_")
        phase = phase.removeprefix("raise_in_")
        self.pids[rank], self._phases[rank] = pid, phase
        for fault in self._waiting.copy():
            is_due = (max(fault.target, 0), fault.phase, fault.time) == (rank, phase, count)
            if is_due and is_raised == (fault.kind == "raise"):
                self._waiting.remove(fault)
                self._after(
                    0.0 if is_raised else fault.after_seconds, partial(self._bring_about, fault)
                )

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, action))

    def _bring_about(self, fault: Fault) -> None:
        self.hits[fault] = time.monotonic(), self._phases[max(fault.target, 0)]
        if fault.kind == "disk full":
            self._fill()
        elif fault.kind in ("link cut", "link cut for good", "host killed", "host lost"):
            self._harm(fault, self._hosts[fault.target])
        elif fault.kind in ("SIGSTOP", "stopped for good"):
            self._send(fault, signal.SIGSTOP)
            if fault.kind == "SIGSTOP":
                self._after(fault.lasts_seconds, partial(self._send, fault, signal.SIGCONT))
        elif fault.kind != "raise":
            self._send(fault, signal.Signals[fault.kind])

    def _harm(self, fault: Fault, host: Host) -> None:
        if fault.kind != "host killed":
            host.cut()
        if fault.kind == "link cut":
            self._after(fault.lasts_seconds, host.mend)
        elif fault.kind != "link cut for good":
            host.kill()

    def _send(self, fault: Fault, number: signal.Signals) -> None:
        for pid in self._targets(fault.target):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _targets(self, target: int) -> list[int]:
        if target == ALL:
            return list(self.pids.values())
        return [self._launcher()] if target == LAUNCHER else [self.pids[target]]

    def _fill(self) -> None:
        with suppress(OSError), open(self._filler, "wb", buffering=0) as file:
            while True:
                file.write(_BLOCK)
