"""What is on its way: tensors that must live until they are sent, and receives to be waited for.

On a CPU only a wait can tell whether an operation of gloo is over, and a wait blocks. So threads
wait, and a failure can wake the thread that computes. On an accelerator the streams wait: no thread
does, and the host goes on. An operation's own stream begins it as soon as its data is there, so
computing goes on beside it.

After a failure a thread may wait for ever for a rank that lives but neither sends nor receives any
more: gloo cannot end a wait. If such a thread wakes up while the interpreter exits, Python 3.11
ends the process by SIGABRT. The cause has been printed by then.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.engine.comms.channel import Inbox, PeerLostError
from lightning_dist.engine.tensors.observers import is_profiling

# A thread that outlives this has a peer that died without closing its connection.
CLOSE_SECONDS = 10.0
CAUSE_SECONDS = 2.0  # how long to wait for the cause when a sender is gone
_POLL_SECONDS = 0.01

Posted = tuple[Sequence[dist.Work], Sequence[Tensor]]
"""Operations under way, and the tensors that they read or write."""


class HostOutbox:
    """Keeps CPU tensors until they have been sent to a peer; a thread waits for that."""

    def __init__(self, peer: int) -> None:
        self._peer = peer
        self._pending: queue.SimpleQueue[Posted | None] = queue.SimpleQueue()  # None ends it
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"send-to-{peer}", daemon=True)
        self._thread.start()

    def keep(self, works: Sequence[dist.Work], tensors: Sequence[Tensor]) -> None:
        """Keeps the tensors of sends that have begun; returns at once, but under a profiler.

        The thread would end the profiler's records of them, maybe while the profiler itself ends
        and reads them, which torch does not survive.
        """
        if is_profiling():
            self._wait_for(works)
        else:
            self._pending.put((works, tensors))

    def check(self) -> None:
        """Raises :class:`.PeerLostError` if an earlier send has failed."""
        if self._failure is not None:
            raise PeerLostError(f"Rank {self._peer} cannot be reached.") from self._failure

    def fail(self, error: BaseException) -> None:
        """Lets each later :meth:`check` fail."""
        self._failure = error

    def close(self) -> None:
        """Waits until everything has been sent."""
        self._pending.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (posted := self._pending.get()) is not None and self._wait_for(posted[0]):
            del posted  # else the last activation stays alive until the next one

    def _wait_for(self, works: Sequence[dist.Work]) -> bool:
        """Waits until tensors have been sent, and returns whether they have."""
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            self.fail(error)
            return False
        return True


class StreamOutbox:
    """Keeps an accelerator's tensors; each send frees those of sends that are over."""

    def __init__(self) -> None:
        self._pending: deque[Posted] = deque()

    def keep(self, works: Sequence[dist.Work], tensors: Sequence[Tensor]) -> None:
        """Keeps the tensors of sends that have begun; returns at once."""
        self._drop_sent()
        self._pending.append((works, tensors))

    def check(self) -> None:
        """Does nothing: the backend reports a broken connection itself."""

    def close(self) -> None:
        """Waits until everything has been sent."""
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._pending and time.monotonic() < deadline:
            self._drop_sent()
            time.sleep(_POLL_SECONDS if self._pending else 0.0)
        self._pending.clear()

    def _drop_sent(self) -> None:
        # Not by a wait: memory that a wait on a stream frees could be written to too early.
        while self._pending and all(work.is_completed() for work in self._pending[0][0]):
            self._pending.popleft()


class HostIntake:
    """Waits for CPU tensors, on a thread."""

    def __init__(self, peer: int, timeout_seconds: float | None) -> None:
        self._peer = peer
        self._inbox = Inbox(peer, timeout_seconds, CAUSE_SECONDS)
        self._posted: queue.SimpleQueue[Posted | None] = queue.SimpleQueue()  # None ends it
        self._thread = threading.Thread(target=self._run, name=f"receive-from-{peer}", daemon=True)
        self._thread.start()

    def take(self, post: Callable[[], Posted]) -> Sequence[Tensor]:
        """Posts receives, and returns their tensors when the caller may use them."""
        self._posted.put(post())
        arrived: Sequence[Tensor] = self._inbox.next()
        return arrived

    def interrupt(self, error: BaseException) -> None:
        """Raises an error in the present and each later :meth:`take`."""
        self._inbox.fail(error)

    def close(self, *, failed: bool = False) -> None:
        """Ends the waiting; after a failure, without what is still awaited."""
        self._posted.put(None)
        if not failed:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            while (posted := self._posted.get()) is not None:
                works, tensors = posted
                for work in works:
                    work.wait()
                self._inbox.put(tensors)
                del posted, works, tensors
        except RuntimeError as error:
            lost = PeerLostError(f"The connection to rank {self._peer} broke: {error}")
            lost.__cause__ = error
            self._inbox.fail(lost)


class StreamIntake:
    """Lets the current stream wait for tensors of an accelerator, and not the host.

    Receives are posted on a stream of their own, where no computing delays them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = torch.get_device_module(device)
        self._own = self._streams.Stream(device=device)
        self._failure: BaseException | None = None

    def take(self, post: Callable[[], Posted]) -> Sequence[Tensor]:
        """Posts receives, and returns their tensors when the current stream may use them."""
        if self._failure is not None:
            raise self._failure
        with self._streams.stream(self._own):
            works, tensors = post()
            for work in works:
                work.wait()
        current = self._streams.current_stream(self._device)
        current.wait_stream(self._own)
        for tensor in tensors:  # their memory is the own stream's, and the current one uses it
            tensor.record_stream(current)
        return tensors

    def interrupt(self, error: BaseException) -> None:
        """Raises an error in each later :meth:`take`."""
        self._failure = error

    def close(self, *, failed: bool = False) -> None:
        """Does nothing: no thread waits."""
