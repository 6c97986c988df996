"""What comes to a receiver by two ways: a queue of its network thread, and shared memory.

Who waits, waits at one place. Without shared memory that is the queue. With it, it is the
semaphore to which both ways add; the change from one to the other comes through the queue itself,
so that nothing is overlooked that came before.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from lightning_dist.engine.comms.packet import Memory
from lightning_dist.engine.comms.shared_ring import AcceptedRing

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class _Attached:
    """Tells who takes that there is shared memory from now on."""

    ring: AcceptedRing


class Arrivals(Generic[Item]):
    """Items in the order of each way.

    Args:
        read: Makes an item of a packet in shared memory, which is used again when it returns.
    """

    def __init__(self, read: Callable[[Memory], Item]) -> None:
        self._read = read
        self._queue: queue.SimpleQueue[Item | _Attached] = queue.SimpleQueue()
        self._ring: AcceptedRing | None = None
        # What those who put things into the queue have to wake, and what keeps them apart.
        self._attached: AcceptedRing | None = None
        self._lock = threading.Lock()

    def put(self, item: Item) -> None:
        """Adds an item; from any thread.

        Args:
            item: What has come.
        """
        with self._lock:
            self._put(item)

    def attach(self, ring: AcceptedRing) -> None:
        """Lets items come through shared memory, too; from any thread.

        Args:
            ring: Takes the place of another, through which nothing comes any more.
        """
        with self._lock:
            self._put(_Attached(ring))
            self._attached = ring

    def take(self, timeout_seconds: float | None) -> Item:
        """Waits for the next item; from one thread only.

        Args:
            timeout_seconds: How long; None waits for ever.

        Raises:
            queue.Empty: None came in time.
        """
        while isinstance(item := self._take_any(timeout_seconds), _Attached):
            self._ring = item.ring
        return item

    def _put(self, item: Item | _Attached) -> None:
        self._queue.put(item)
        if self._attached is not None:
            self._attached.arrived.post()

    def _take_any(self, timeout_seconds: float | None) -> Item | _Attached:
        ring = self._ring
        if ring is None:
            return self._queue.get(timeout=timeout_seconds)
        if not ring.arrived.wait(timeout_seconds):
            raise queue.Empty
        # Packets first: they were sent before their sender closed the channel, or died.
        if (packet := ring.take()) is None:
            return self._queue.get_nowait()
        try:
            return self._read(packet)
        finally:
            ring.release()
