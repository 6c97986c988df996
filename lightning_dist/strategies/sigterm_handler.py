"""SIGTERM sets a flag while a run lasts, from the first thing that its ranks do together.

Lightning registers its handlers when all is set up. Until then a signal would end the process where
it stands, among ranks that wait for it. Lightning calls the handler that it finds beside its own,
so this one stays in force. It is taken back when the ranks have parted; then the signal does again
what it did before.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

import lightning.pytorch as pl

from lightning_dist.strategies import lightning_private


class SigtermHandler:
    """Handles the signal from its construction on, if that is in the main thread.

    Args:
        trainer: Must not have registered its own handlers yet.
        on_signal: Called in the handler, so it must do nothing that waits.
    """

    def __init__(self, trainer: pl.Trainer, on_signal: Callable[[], None]) -> None:
        self._trainer = trainer
        self._on_signal = on_signal
        self._process = os.getpid()
        # One that is not Python's reads as None, and cannot be put back.
        self._before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
        self._install(self)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Calls ``on_signal`` in the process of the run.

        A process that was forked from it, by a pool for one, has no run that could end. A pool
        ends its processes by this signal and waits until they have.
        """
        if os.getpid() == self._process:
            self._on_signal()
        else:
            self._install(self._before)
            signal.raise_signal(signum)

    def remove(self) -> None:
        """Gives the signal back to whom it belonged."""
        self._install(self._before)
        lightning_private.replace_sigterm_to_restore(self._trainer, self._before)

    def _install(self, handler: lightning_private.SignalHandler) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
