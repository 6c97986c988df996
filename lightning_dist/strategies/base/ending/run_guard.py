"""End all ranks of a run together: when one fails, and when one is asked to stop.

A rank that fails reports its exception to the others, which raise it too. But a hook that all ranks
run may raise on all of them, between two steps and with nothing in flight. Then a checkpoint can
still be written. A rank that fails alone must not wait for the others, which do not know yet. So a
rank that fails leaves a note, and checks for a moment whether all have left one. The first rank to
decide decides for all.
"""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import blake2b

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_dist.engine.comms.failures.heartbeat import Notice, Rhythm, Standstill
from lightning_dist.engine.comms.failures.peer_failure import Failure, FailureRing, exit_after_grace
from lightning_dist.engine.comms.store_notes import RankNotes
from lightning_dist.engine.comms.votes import StopAgreement, StopReason
from lightning_dist.engine.tensors.patch import Undo
from lightning_dist.strategies.base import lightning_internals
from lightning_dist.strategies.base.ending.brief_errors import show_briefly
from lightning_dist.strategies.base.ending.signal_handlers import (
    SIGTERM_EXIT_CODE,
    FlagHandler,
    InterruptHandler,
    requeue_signal,
)

_NEWS_SECONDS = 2.0
_ALIKE_SECONDS = 1.5  # for other ranks to fail, too
_POLL_SECONDS = 0.05
_STORE_SECONDS = 1.0  # to answer


class RunGuard:
    """Watches over one run, from the start of its processes to its teardown.

    The trainer must not have registered its signal handlers yet, nor may the gloo group of the ring
    time out. ``interrupt`` raises an error in the main thread, where it waits for another rank.
    ``steps_are_local`` says whether an exception in a step leaves no other rank inside of it, and
    ``outlives`` whether this rank goes on behind another one's failure.

    Attributes:
        stop: This rank's part in the decision to stop.
        is_leaving: Whether an exception ends the run on this rank.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        *,
        ring_group: dist.ProcessGroup,
        stop: StopAgreement,
        interrupt: Callable[[BaseException], None],
        is_stop_due: bool,
        notes: RankNotes,
        steps_are_local: Callable[[], bool],
        timeout_seconds: float,
        outlives: Callable[[Failure], bool],
    ) -> None:
        self._trainer = trainer
        self._rank = dist.get_rank()
        self._interrupt = interrupt
        self._notes = notes
        self._steps_are_local = steps_are_local
        self._timeout_seconds = timeout_seconds
        self._outlives = outlives
        self._failed = threading.Event()
        self._has_news = threading.Event()  # of another rank's failure, outlived or not
        self._news_time = 0.0
        self._closed = threading.Event()
        self._own_failure: Failure | None = None
        self._peers_failure: Failure | None = None
        self._have_all_failed = False
        self.is_leaving = False
        self._has_stopped = False
        self._has_boundaries = False
        self._file_work = ""
        self.stop = stop
        terminate = partial(self.stop.request, StopReason.TERMINATE)
        if is_stop_due:
            terminate()
        self._requeue: Callable[[], None] | None = None
        self._undo_signals: tuple[Undo, ...] = ()
        self._handlers: list[FlagHandler | InterruptHandler] = []
        self._handlers.append(FlagHandler(trainer, signal.SIGTERM, terminate))
        requeues = requeue_signal(trainer)
        if requeues is not None and signal.getsignal(requeues) is signal.SIG_DFL:
            ask = partial(self.stop.request, StopReason.REQUEUE)
            self._handlers.append(FlagHandler(trainer, requeues, ask))  # Lightning adds none to it
        self._handlers.append(InterruptHandler(trainer, self._interrupt_at_boundary))
        self._ring: FailureRing | None = None
        if dist.get_world_size() > 1:
            self._ring = FailureRing(
                ring_group,
                rank=self._rank,
                world_size=dist.get_world_size(),
                rhythm=Rhythm.for_timeout(timeout_seconds),
                progress=lambda: self._file_work or _progress_of(trainer),
                on_failure=self._on_peer_failure,
                on_notice=self._on_notice,
            )

    # --- stops -------------------------------------------------------------------------------

    @property
    def is_stop_due(self) -> bool:
        """Whether this rank was asked to stop when no batch boundary was left."""
        return self.stop.requested is StopReason.TERMINATE and not self._has_stopped

    def stop_if_agreed(self, *, is_in_step: bool = False) -> None:
        """Combines the ranks' requests to stop. Collective, once before each batch.

        ``is_in_step`` says that gradients wait for those of later batches. No checkpoint has them,
        so the stop waits, too.

        Raises:
            SIGTERMException: As for :meth:`obey`.
            KeyboardInterrupt: As for :meth:`obey`.
            ValueError: As for :meth:`check_peers`.
            RankFailedError: As for :meth:`check_peers`.
        """
        self.check_peers()
        self._has_boundaries = True
        reason = self.stop.at_boundary()
        if not is_in_step:
            self.obey(reason)

    def obey(self, reason: StopReason) -> None:
        """Does what the ranks were asked for. Collective: every rank with the same reason.

        Raises:
            SIGTERMException: All ranks stop here; uncaught, it ends the process with
                ``SIGTERM_EXIT_CODE``.
            KeyboardInterrupt: All ranks stop here.
        """
        if reason is StopReason.REQUEUE:
            assert self._requeue is not None
            self.stop.go_on(reason)
            self._requeue()  # SLURM ends the job when it sees fit
            return
        self._has_stopped = reason is not StopReason.NONE
        if reason is StopReason.TERMINATE:
            lightning_internals.set_received_sigterm(self._trainer)
            raise SIGTERMException(SIGTERM_EXIT_CODE)
        if reason is StopReason.INTERRUPT:
            raise KeyboardInterrupt

    def _interrupt_at_boundary(self) -> bool:
        if not self._has_boundaries or self.is_leaving:
            return False
        self.stop.request(StopReason.INTERRUPT)
        return True

    def connect_signals(
        self, before_reading: Callable[[], None], finish_save: Callable[[], None]
    ) -> None:
        """Replaces Lightning's reaction to signals by the ranks' agreement.

        ``before_reading`` is called before each training batch is read, for which there is no hook.
        """

        def before_batch() -> None:
            self.stop_if_agreed(is_in_step=lightning_internals.is_in_step(self._trainer))
            before_reading()

        undo_sigterm = lightning_internals.replace_sigterm_protocol(self._trainer, before_batch)
        ask = partial(self.stop.request, StopReason.REQUEUE)
        self._requeue, undo_requeue = lightning_internals.replace_requeue(
            self._trainer, ask, finish_save
        )
        self._undo_signals = (undo_sigterm, undo_requeue)

    # --- failures ----------------------------------------------------------------------------

    @property
    def is_sound(self) -> bool:
        """Whether no rank is known to have failed."""
        return not self._failed.is_set()

    def check_peers(self) -> None:
        """Raises another rank's failure on a rank that was not waiting when the failure came.

        Raises:
            ValueError: Another rank has raised one, for a mistake of the user's.
            RankFailedError: Another rank has failed otherwise.
        """
        if self._peers_failure is not None and not self.is_leaving:
            raise self._peers_failure.to_exception()

    def report(self, exception: BaseException) -> None:
        """Reports a failure to the other ranks, unless all have stopped or failed alike."""
        is_first, self.is_leaving = not self.is_leaving, True
        if self._has_stopped or self._have_all_failed or self._failed.is_set():
            return
        if is_first and self._is_shared(exception):
            self._have_all_failed = True
            show_briefly(exception, is_shown_elsewhere=self._rank > 0)
            return
        if isinstance(exception, RuntimeError) and self._ring is not None:
            # A broken collective raises one too; the report of the rank that broke it may come.
            if time.monotonic() - self._news_time > _NEWS_SECONDS:
                self._has_news.clear()  # those were of a failure that was outlived long ago
            self._has_news.wait(_NEWS_SECONDS)
        self._failed.set()
        if self._ring is not None:
            self._own_failure = self._failure_of(exception, self._ring.standstill)
            self._ring.announce(self._own_failure)

    def _is_shared(self, error: BaseException) -> bool:
        """Returns whether all ranks have failed alike, after a short wait; called once in a run."""
        if lightning_internals.is_raised_in_step(error) and not self._steps_are_local():
            return False
        numbers = [_digest(error, self._trainer)]
        found = threading.Event()
        deadline = time.monotonic() + _ALIKE_SECONDS

        def look() -> None:
            with suppress(RuntimeError):  # the store's process is gone
                self._notes.leave(0, numbers)
                is_common = False
                while not is_common and time.monotonic() < deadline:
                    if self._has_news.is_set():
                        break
                    is_common = bool(self._notes.await_common(0, numbers, _POLL_SECONDS))
                if self._notes.decide(0, is_common):
                    found.set()

        # A thread of its own: the store may be in a process that does not answer any more.
        looking = threading.Thread(target=look, name="shared-failure", daemon=True)
        looking.start()
        looking.join(_ALIKE_SECONDS + _STORE_SECONDS)
        return found.is_set()

    def _failure_of(self, exception: BaseException, standstill: Standstill | None) -> Failure:
        failure = Failure.from_exception(self._rank, exception)
        if standstill is None or not _is_timeout(exception):
            return failure
        exception.add_note(str(standstill))
        failure = Failure.from_standstill(standstill, failure.details)
        _end_unanswering(failure)
        return failure

    def leave(self) -> None:
        """Ends collectives among ranks that have failed alike."""
        if self._have_all_failed:
            self._failed.set()

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Ends the watch after a block that closes all else. Collective: every rank must enter it.

        After a failure other ranks may not answer any more. A rank that received the failure has a
        grace period to get through here. The failed rank's own period begins now, for that rank may
        have had to save something first.
        """
        if self._own_failure is not None:
            exit_after_grace(self._own_failure, self._closed.is_set)
        try:
            yield
            if self.is_sound:
                self.stop.close()
            if self._ring is not None:
                self._ring.close()
        finally:
            for undo in self._undo_signals:
                undo()
            self._undo_signals = ()
            for handler in self._handlers:
                handler.remove()
            self._closed.set()
        if self.stop.requested is StopReason.INTERRUPT and not self.is_leaving:
            raise KeyboardInterrupt  # no batch boundary was left for it

    @contextmanager
    def file_work(self, activity: str) -> Iterator[None]:
        """Names work on files in the progress that other ranks see, should this rank be stuck."""
        before, self._file_work = self._file_work, activity
        try:
            yield
        finally:
            self._file_work = before

    def _on_notice(self, notice: Notice) -> None:
        text = str(notice)
        if isinstance(notice, Standstill) and notice.is_silent:
            text += f" The run ends when that lasts for timeout_s={self._timeout_seconds:g}."
        print(f"[rank {self._rank}] {text}", file=sys.stderr, flush=True)

    def _on_peer_failure(self, failure: Failure) -> None:
        self._news_time = time.monotonic()
        if self._outlives(failure):
            print(f"[rank {self._rank}] {failure}. Going on.", file=sys.stderr, flush=True)
            self._has_news.set()
            return
        _end_unanswering(failure)
        was_known = self._failed.is_set()
        self._peers_failure = failure
        self._failed.set()
        self._has_news.set()
        if not was_known:
            # At once: a launcher that notices too may kill this process before it can raise.
            print(f"[rank {self._rank}] {failure}", file=sys.stderr, flush=True)
            self._interrupt(failure.to_exception())
            exit_after_grace(failure, self._closed.is_set)


def _progress_of(trainer: pl.Trainer) -> str:
    stage = trainer.state.stage
    if stage is RunningStage.TRAINING:
        return f"training, epoch {trainer.current_epoch}, batch {trainer.fit_loop.batch_idx}"
    return "between two runs" if stage is None else f"in the stage {stage.value!r}"


def _digest(error: BaseException, trainer: pl.Trainer) -> int:
    """Returns a number that is the same for the same exception at the same place in a run."""
    loop = trainer.fit_loop.epoch_loop
    frames = traceback.walk_tb(error.__traceback__)
    lines = [(frame.f_code.co_name, line) for frame, line in frames]
    progress = trainer.state.stage, loop.total_batch_idx, loop.global_step
    place = (type(error).__qualname__, lines, *progress)
    return int.from_bytes(blake2b(repr(place).encode(), digest_size=7).digest(), "little")


def _is_timeout(exception: BaseException) -> bool:
    # Collectives that time out raise errors of several kinds, according to their backend.
    is_torchs = isinstance(exception, RuntimeError) and re.search(
        "time(d )?out", str(exception), re.I
    )
    return isinstance(exception, TimeoutError) or bool(is_torchs)


def _end_unanswering(failure: Failure) -> None:
    """Kills a process that would stay stopped when all others have ended."""
    if failure.unanswering is not None:
        failure.unanswering.kill_child()
