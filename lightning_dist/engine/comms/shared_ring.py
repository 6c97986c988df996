"""Packets in memory that two processes of one host share.

Between two processes of one host a socket is a detour. What is slow is not the bytes: the sender
asks the system, which wakes the receiver's network thread, which wakes the thread that waits, which
wakes the stage; and all of them want the cores on which the stages compute. Here a sender writes a
packet where the receiver looks for it when it needs it, and no thread wakes up who need not.

Nobody waits for an agreement. The sender *offers* memory in a message that it sends anyway. A
receiver that can open it (:mod:`.batches.memory_file`) says so in the memory itself,
where the sender looks before each packet. Where none can, nothing is said, and packets go on by the
socket.

A semaphore in memory that processes share.

Python's own are for processes of which one has started the other. The system's are in any memory
that both see. Posting and taking what has been posted are a few instructions; only who has to wait,
and who wakes somebody, asks the system.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import time
from dataclasses import dataclass

import numpy as np

from lightning_dist.engine.comms.batches.memory_file import SECRET_BYTES, open_file
from lightning_dist.engine.comms.packet import Memory

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


NUM_SLOTS = 8
"""Packets that can be under way; memory that none has been in costs nothing."""

_NAME = "lightning_dist"
# Of the first page, behind the secret: whether the offer is accepted, and the semaphores.
_ACCEPTED = SECRET_BYTES
_ROOM, _FILLED, _ARRIVED = (SEMAPHORE_BYTES * place for place in (1, 2, 3))


@dataclass(frozen=True, slots=True)
class Offer:
    """Where another process of the host finds the memory.

    Attributes:
        process: Id of the process that offers it.
        descriptor: Number of the open file there.
        secret: What the memory begins with. Another host may have such a process, too.
        slot_bytes: Room for a packet.
    """

    process: int
    descriptor: int
    secret: bytes
    slot_bytes: int


class _Ring:
    """What both ends see: slots that are filled, and emptied, one after the other.

    Args:
        descriptor: An open file of the right size.
        slot_bytes: Room for a packet; a multiple of a page.
    """

    def __init__(self, descriptor: int, slot_bytes: int) -> None:
        self._pages = mmap.mmap(descriptor, _file_bytes(slot_bytes))
        self._slot_bytes = slot_bytes
        self._room = Semaphore(self._pages, _ROOM)
        self._filled = Semaphore(self._pages, _FILLED)
        self.arrived = Semaphore(self._pages, _ARRIVED)
        self._turn = 0

    def _take_turn(self) -> Memory:
        begin = mmap.PAGESIZE + self._turn % NUM_SLOTS * self._slot_bytes
        self._turn += 1
        return np.frombuffer(self._pages, np.uint8, self._slot_bytes, begin)


class OfferedRing(_Ring):
    """The sender's end.

    Args:
        num_bytes: Of its largest packet.

    Raises:
        OSError: The system gives no such memory.
    """

    def __init__(self, num_bytes: int) -> None:
        # Powers of two: who sends larger and larger packets shall not offer as many times.
        slot_bytes = max(mmap.PAGESIZE, 1 << (num_bytes - 1).bit_length())
        self._descriptor = os.memfd_create(_NAME)
        os.ftruncate(self._descriptor, _file_bytes(slot_bytes))
        super().__init__(self._descriptor, slot_bytes)
        self._room.begin(NUM_SLOTS)
        self._filled.begin(0)
        self.arrived.begin(0)
        secret = secrets.token_bytes(SECRET_BYTES)
        self._pages[:SECRET_BYTES] = secret
        self.offer = Offer(os.getpid(), self._descriptor, secret, slot_bytes)

    @property
    def is_accepted(self) -> bool:
        """Whether the receiver looks there."""
        return bool(self._pages[_ACCEPTED])

    def take(self) -> Memory | None:
        """Gives the next slot, to be filled; None as long as the receiver has not emptied it."""
        return self._take_turn() if self._room.try_wait() else None

    def hand_over(self) -> None:
        """Lets the receiver have what has been taken and filled."""
        self._filled.post()
        self.arrived.post()

    def close(self) -> None:
        """Takes the offer back; who has accepted it can still look."""
        os.close(self._descriptor)


class AcceptedRing(_Ring):
    """The receiver's end; made by :meth:`accept`.

    Attributes:
        arrived: Counts what has been handed over, and whatever else this process adds.
    """

    @classmethod
    def accept(cls, offer: Offer) -> AcceptedRing | None:
        """Opens what a sender offers, and says so.

        Args:
            offer: What it has sent.

        Returns:
            None where this process cannot.
        """
        try:
            descriptor = open_file(offer.process, offer.descriptor, _NAME)
        except OSError:
            return None
        try:
            if os.fstat(descriptor).st_size != _file_bytes(offer.slot_bytes):
                return None
            ring = cls(descriptor, offer.slot_bytes)
        finally:
            os.close(descriptor)
        if ring._pages[:SECRET_BYTES] != offer.secret:
            return None
        ring._pages[_ACCEPTED] = 1
        return ring

    def take(self) -> Memory | None:
        """Gives the next packet, if it is there; it must be released."""
        return self._take_turn() if self._filled.try_wait() else None

    def release(self) -> None:
        """Lets the sender have the slot again that was taken before all others."""
        self._room.post()


def _file_bytes(slot_bytes: int) -> int:
    return mmap.PAGESIZE + NUM_SLOTS * slot_bytes
