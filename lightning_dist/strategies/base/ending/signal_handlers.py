"""Signals set a flag while a run lasts, from the first collective of its ranks on.

Lightning registers its handlers when all is set up. Until then a signal would end the process at
any place, among ranks that wait for it. Lightning calls the installed handler beside its own, so
this one stays in force, and calls in turn the one that the script has installed. A
``KeyboardInterrupt`` in the middle of a step would leave ranks at different places. So the first
Ctrl-C waits for a batch boundary of all ranks, the second does not.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import SLURMEnvironment

from lightning_dist.strategies.base import lightning_internals

SIGTERM_EXIT_CODE = 128 + signal.SIGTERM
"""Exit code of a run that SIGTERM has stopped, as a shell reports it; launchers read "not done"."""


def requeue_signal(trainer: pl.Trainer) -> signal.Signals | None:
    """Returns the signal by which SLURM announces the end of a job that Lightning requeues."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return environment.requeue_signal
    return None


class FlagHandler:
    """Handles a signal from its construction on, if that is in the main thread.

    The trainer must not have registered its own handlers yet. ``on_signal`` must not wait.
    """

    def __init__(
        self, trainer: pl.Trainer, signum: signal.Signals, on_signal: Callable[[], None]
    ) -> None:
        self._trainer = trainer
        self._signum = signum
        self._on_signal = on_signal
        self._process = os.getpid()
        self._rank = trainer.global_rank  # a step may be shown another
        self._has_printed = False
        # A handler that is not Python's reads as None, and cannot be restored.
        self._before = signal.getsignal(signum) or signal.SIG_DFL
        self._install(self)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Calls ``on_signal`` in the process of the run, and then the script's own handler.

        A forked process has no run to end. A pool's must end by SIGTERM, for the pool waits. But
        SLURM sends its signal to all processes of a job, to the workers of a loader too.
        """
        if os.getpid() == self._process:
            self._on_signal()
            printed, self._has_printed = self._has_printed, True  # before the signal comes again
            if not printed:  # launchers report a stop as a failure
                does = "stop" if signum == signal.SIGTERM else "save"
                name = self._signum.name
                text = f"[rank {self._rank}] {name}: all ranks {does} at a coming batch.\n"
                os.write(2, text.encode())
            if callable(self._before):
                self._before(signum, frame)
        elif signum == signal.SIGTERM:
            self._install(self._before)
            signal.raise_signal(signum)

    def remove(self) -> None:
        """Installs the handler that was there before."""
        self._install(self._before)
        lightning_internals.replace_handler_to_restore(self._trainer, self._signum, self._before)

    def _install(self, handler: lightning_internals.SignalHandler) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(self._signum, handler)


class InterruptHandler:
    """Handles Ctrl-C from its construction on, where Python's own handler would.

    As :class:`FlagHandler`; ``on_signal`` returns whether a batch boundary is to come.
    """

    def __init__(self, trainer: pl.Trainer, on_signal: Callable[[], bool]) -> None:
        self._trainer = trainer
        self._on_signal = on_signal
        self._process = os.getpid()
        self._is_waiting = False
        is_main = threading.current_thread() is threading.main_thread()
        is_pythons = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._is_installed = is_main and is_pythons
        if self._is_installed:
            signal.signal(signal.SIGINT, self)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Waits for a batch boundary the first time.

        Raises:
            KeyboardInterrupt: No batch boundary is to come, or the signal comes a second time.
        """
        if self._is_waiting or os.getpid() != self._process or not self._on_signal():
            signal.default_int_handler(signum, frame)
        self._is_waiting = True
        os.write(2, b"\nAll ranks stop at a coming batch. Once more: this one stops at once.\n")

    def remove(self) -> None:
        """Restores Python's own handler."""
        if self._is_installed:
            if signal.getsignal(signal.SIGINT) is self:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            own = signal.default_int_handler
            lightning_internals.replace_handler_to_restore(self._trainer, signal.SIGINT, own)
