"""How all ranks learn of one rank's failure, at once and with the true cause.

When a rank dies, the others would sit in a receive until the process group's timeout, half an hour
by default, and then report the timeout. So each rank has a thread that waits for a message from its
successor and is idle otherwise. A rank that raises sends its traceback to its predecessor, which
passes it on around the ring. A rank that is killed sends nothing, but the kernel closes its
connection, which its predecessor sees within milliseconds and passes on likewise. Nothing is polled
and nothing depends on a rank that may be the lost one.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_dist.pipeline.channel import ChannelClosedError, PeerLostError
from lightning_dist.pipeline.receiver import DistributedReceiver
from lightning_dist.pipeline.sender import DistributedSender

_CLOSE_SECONDS = 2.0


class RankFailedError(RuntimeError):
    """Another rank has failed first."""


class RemoteTraceback(Exception):  # noqa: N818  (it is the text of one)
    """The traceback of another process, printed before the error that it caused."""

    def __str__(self) -> str:
        """Gives the text on lines of its own."""
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run ends.

    Attributes:
        rank: The rank that failed first.
        summary: One line.
        details: The traceback, if there is one.
        is_value_error: Whether it was the user's input, so that each rank says so alike.
    """

    rank: int
    summary: str
    details: str = ""
    is_value_error: bool = False

    @classmethod
    def from_exception(cls, rank: int, error: BaseException) -> Failure:
        """Describes an exception of this process.

        Args:
            rank: This rank.
            error: What was raised.
        """
        summary = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
        details = "".join(traceback.format_exception(error))
        return cls(rank, summary, details, isinstance(error, ValueError))

    def __str__(self) -> str:
        """Says who failed and why, on one line."""
        return f"Rank {self.rank} failed first: {self.summary}"

    def to_exception(self) -> Exception:
        """Makes the exception that the other ranks raise."""
        if self.is_value_error:
            return ValueError(f"{self.summary}\n(raised on rank {self.rank})")
        error = RankFailedError(str(self))
        if self.details:
            error.__cause__ = RemoteTraceback(self.details)
        return error


class FailureRing:
    """One rank's place in the ring.

    Args:
        group: A gloo group of all ranks whose timeout never comes.
        rank: This rank.
        world_size: All ranks.
        on_failure: Called once, on the listening thread, with another rank's failure.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        world_size: int,
        on_failure: Callable[[Failure], None],
    ) -> None:
        self._predecessor = (rank - 1) % world_size
        self._successor = (rank + 1) % world_size
        self._on_failure = on_failure
        self._failure: Failure | None = None
        self._has_said_goodbye = False
        self._lock = threading.Lock()
        self._has_news = threading.Event()
        self._sender = DistributedSender(group, self._predecessor)
        self._receiver = DistributedReceiver(
            group, self._successor, torch.device("cpu"), timeout_seconds=None, cause_seconds=0.0
        )
        self._thread = threading.Thread(target=self._listen, name="failure-ring", daemon=True)
        self._thread.start()

    def wait_for_news(self, seconds: float) -> None:
        """Waits until another rank's failure is known, but not for long.

        Args:
            seconds: How long at most.
        """
        self._has_news.wait(seconds)

    def announce(self, failure: Failure) -> None:
        """Tells the others, unless they have been told of an earlier failure.

        Args:
            failure: This rank's own.
        """
        if self._is_first(failure):
            self._pass_on(failure)
            self._say_goodbye()

    def close(self) -> None:
        """Says goodbye, so that this rank's exit is not taken for a failure."""
        self._say_goodbye()
        self._receiver.close()
        self._thread.join(_CLOSE_SECONDS)

    def _listen(self) -> None:
        try:
            while True:
                self._learn(self._receiver.receive())
        except ChannelClosedError:
            return  # goodbye
        except PeerLostError:
            lost = f"the process of rank {self._successor} was lost (its connection closed)"
            self._learn(Failure(self._successor, lost))

    def _learn(self, failure: Failure) -> None:
        if not self._is_first(failure):
            return
        if failure.rank != self._predecessor:
            self._pass_on(failure)
        self._on_failure(failure)
        self._has_news.set()
        # Not in `close`: this rank may sit in a collective that only the predecessor's end can
        # break, and the predecessor does not end before it has heard a goodbye.
        self._say_goodbye()

    def _is_first(self, failure: Failure) -> bool:
        with self._lock:
            is_first = self._failure is None
            self._failure = self._failure or failure
        return is_first

    def _say_goodbye(self) -> None:
        with self._lock:
            said, self._has_said_goodbye = self._has_said_goodbye, True
        if not said:
            self._sender.close()

    def _pass_on(self, failure: Failure) -> None:
        with contextlib.suppress(PeerLostError):  # a dead predecessor needs no news
            self._sender.send(failure)
