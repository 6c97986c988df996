"""Find out whether all ranks have failed alike: the same exception at the same place.

A hook that all ranks run may raise on all of them, between two steps and with nothing in flight.
Then a checkpoint can still be written. A rank that fails alone must not wait for the others, which
do not know yet. So a rank that fails leaves a note, and checks for a moment whether all have left
one. The first rank to decide decides for all.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from hashlib import blake2b

import lightning.pytorch as pl

from lightning_dist.engine.comms.store_notes import RankNotes
from lightning_dist.strategies.base.lightning_internals import is_raised_in_step

_SECONDS = 1.5
_POLL_SECONDS = 0.05
_STORE_SECONDS = 1.0  # to answer


class SharedFailure:
    """Decides on one rank whether all ranks have failed alike.

    Args:
        trainer: The trainer of the run.
        notes: The notes of all ranks.
        steps_are_local: Whether an exception in a step leaves no other rank inside of that step.
        seconds: Seconds that other ranks may take to fail, too.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        notes: RankNotes,
        *,
        steps_are_local: bool,
        seconds: float = _SECONDS,
    ) -> None:
        self._trainer = trainer
        self._notes = notes
        self._steps_are_local = steps_are_local
        self._seconds = seconds

    def is_shared(self, error: BaseException, has_peer_failed: threading.Event) -> bool:
        """Returns whether all ranks have failed alike, after a short wait; once in a run at most.

        Args:
            error: The exception that ends this rank's run.
            has_peer_failed: Ends the wait when it is set.
        """
        if is_raised_in_step(error) and not self._steps_are_local:
            return False
        numbers = [self._digest(error)]
        found = threading.Event()
        deadline = time.monotonic() + self._seconds

        def look() -> None:
            self._notes.leave(0, numbers)
            is_common = False
            while not is_common and time.monotonic() < deadline and not has_peer_failed.is_set():
                is_common = bool(self._notes.await_common(0, numbers, _POLL_SECONDS))
            if self._notes.decide(0, is_common):
                found.set()

        # A thread of its own: the store may be in a process that does not answer any more.
        looking = threading.Thread(
            target=_quietly, args=(look,), name="shared-failure", daemon=True
        )
        looking.start()
        looking.join(self._seconds + _STORE_SECONDS)
        return found.is_set()

    def _digest(self, error: BaseException) -> int:
        loop = self._trainer.fit_loop.epoch_loop
        lines = [
            (frame.f_code.co_name, line) for frame, line in traceback.walk_tb(error.__traceback__)
        ]
        place = (
            type(error).__qualname__,
            lines,
            self._trainer.state.stage,
            loop.total_batch_idx,
            loop.global_step,
        )
        return int.from_bytes(blake2b(repr(place).encode(), digest_size=7).digest(), "little")


def _quietly(look: Callable[[], None]) -> None:
    try:
        look()
    except RuntimeError:  # the store's process is gone
        return
