"""Packets in memory that two processes of one host share.

Between two processes of one host a socket is a detour. The bytes are not what is slow: the sender
makes a system call, which wakes the receiver's network thread, which wakes the waiting thread. All
of these threads want the cores on which the stages compute. Here a sender writes a packet to memory
in which the receiver looks when it needs the packet, and no thread wakes up needlessly.

Neither end waits for an agreement. The sender *offers* memory in a message that it sends anyway. If
the receiver can open the memory (:mod:`.batches.memory_file`), it sets a flag in the memory itself.
The sender reads that flag before each packet. If the receiver cannot, the flag stays unset, and
packets go on through the socket.

:class:`Semaphore` is a semaphore in memory that processes share.

Python's own semaphores need one process to have started the other. The system's semaphores work in
any shared memory. Posting, and taking without a wait, are a few instructions. Only waiting, and
waking a waiting thread, need a system call.
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
"""Size of a semaphore: a cache line, of which the system's C library needs half."""

# Waits end by the real-time clock, which may be set meanwhile, so a long wait is cut into these.
_LONGEST_WAIT_SECONDS = 1.0


class _Moment(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Semaphore:
    """A semaphore between processes.

    Args:
        memory: Memory that the processes share.
        offset: Offset of the semaphore there; a multiple of :data:`SEMAPHORE_BYTES`.
    """

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        # Keeps the interpreter's lock in calls that never wait: a thread that releases the lock may
        # have to wait long until another thread returns it.
        self._quick = ctypes.PyDLL(None)
        self._place = ctypes.byref((ctypes.c_char * SEMAPHORE_BYTES).from_buffer(memory, offset))

    def begin(self, count: int) -> None:
        """Initializes the semaphore; one process must call it before any process uses it.

        Args:
            count: Initial count.

        Raises:
            OSError: The system has no semaphores between processes.
        """
        if self._library.sem_init(self._place, 1, count):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def post(self) -> None:
        """Adds one to the count."""
        self._quick.sem_post(self._place)

    def try_wait(self) -> bool:
        """Takes one from the count unless it is zero, and returns whether it did."""
        return bool(self._quick.sem_trywait(self._place) == 0)

    def wait(self, timeout_seconds: float | None) -> bool:
        """Waits until the count is not zero, and takes one from it.

        Args:
            timeout_seconds: How long to wait; None waits for ever.

        Returns:
            Whether the count was not zero in time.
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
"""Number of packets that can be under way; slots that were never used cost no memory."""

_NAME = "lightning_dist"
# Offsets in the first page, after the secret: of the acceptance flag, and of the semaphores.
_ACCEPTED = SECRET_BYTES
_ROOM, _FILLED, _ARRIVED = (SEMAPHORE_BYTES * place for place in (1, 2, 3))


@dataclass(frozen=True, slots=True)
class Offer:
    """The place where another process of the host finds the memory.

    Attributes:
        process: Id of the process that offers the memory.
        descriptor: Number of the open file in that process.
        secret: First bytes of the memory, since another host may have a process of that id, too.
        slot_bytes: Size of a slot for one packet.
    """

    process: int
    descriptor: int
    secret: bytes
    slot_bytes: int


class _Ring:
    """The ring as both ends see it: slots that are filled, and emptied, one after the other.

    Args:
        descriptor: An open file of the right size.
        slot_bytes: Size of a slot for one packet; a multiple of a page.
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
    """The sender's end of a ring.

    Args:
        num_bytes: Bytes of the largest packet.

    Raises:
        OSError: The system gives no such memory.
    """

    def __init__(self, num_bytes: int) -> None:
        # Powers of two, so that a sender of ever larger packets makes few new offers.
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
        """Whether the receiver has accepted the offer."""
        return bool(self._pages[_ACCEPTED])

    def take(self) -> Memory | None:
        """Returns the next slot, to be filled; None as long as the receiver has not emptied it."""
        return self._take_turn() if self._room.try_wait() else None

    def hand_over(self) -> None:
        """Hands the slot that was taken and filled to the receiver."""
        self._filled.post()
        self.arrived.post()

    def close(self) -> None:
        """Withdraws the offer; a receiver that has accepted it keeps the memory."""
        os.close(self._descriptor)


class AcceptedRing(_Ring):
    """The receiver's end of a ring; created by :meth:`accept`.

    Attributes:
        arrived: Counts the packets handed over, and other items that this process adds.
    """

    @classmethod
    def accept(cls, offer: Offer) -> AcceptedRing | None:
        """Opens the memory that a sender offers, and accepts the offer.

        Args:
            offer: The sender's offer.

        Returns:
            The ring; None if this process cannot open the memory.
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
        """Returns the next packet, which must be released; None if there is none."""
        return self._take_turn() if self._filled.try_wait() else None

    def release(self) -> None:
        """Returns the slot that was taken first to the sender."""
        self._room.post()


def _file_bytes(slot_bytes: int) -> int:
    return mmap.PAGESIZE + NUM_SLOTS * slot_bytes
