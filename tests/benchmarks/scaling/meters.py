"""What a process has open, holds and has sent, as Linux counts it."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

# Offsets in the kernel's `struct tcp_info`.
_BYTES_RECEIVED, _DATA_SEGMENTS_OUT, _BYTES_SENT = 128, 156, 200
_TCP_INFO_BYTES = 256


@dataclass(frozen=True)
class Sent:
    """What a process has sent over TCP so far.

    Attributes:
        segments: Segments with data. A small message is one; a large one is cut into several.
        num_bytes: Bytes, those of gloo's own headers included.
        to_store: Bytes to the store, by which ranks find each other.
        from_store: Bytes from the store.
        connections: Open connections to other ranks.
    """

    segments: int
    num_bytes: int
    to_store: int
    from_store: int
    connections: int

    @classmethod
    def so_far(cls) -> Sent:
        """Asks the kernel about each open connection of this process."""
        sums: Counter[str] = Counter()
        store = int(os.environ["MASTER_PORT"])
        for name in os.listdir("/proc/self/fd"):
            try:
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                duplicate = socket.socket(fileno=os.dup(int(name)))
            except OSError:  # closed meanwhile
                continue
            with duplicate:
                if duplicate.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if duplicate.type != socket.SOCK_STREAM:
                    continue
                try:
                    peer = duplicate.getpeername()
                except OSError:  # one that listens
                    continue
                info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            (num_bytes,) = struct.unpack_from("Q", info, _BYTES_SENT)
            if peer[1] == store:
                sums["to store"] += num_bytes
                sums["from store"] += struct.unpack_from("Q", info, _BYTES_RECEIVED)[0]
                continue
            sums["segments"] += struct.unpack_from("I", info, _DATA_SEGMENTS_OUT)[0]
            sums["bytes"] += num_bytes
            sums["connections"] += 1
        names = ("segments", "bytes", "to store", "from store", "connections")
        return cls(*(sums[name] for name in names))


@dataclass(frozen=True)
class Footprint:
    """What a process has open and holds.

    Attributes:
        threads: Threads.
        descriptors: Open files and sockets.
        resident: Bytes in memory.
        own: Bytes in memory that no other process shares: of a forked one, what it has written.
    """

    threads: int
    descriptors: int
    resident: int
    own: int

    @classmethod
    def now(cls) -> Footprint:
        """Reads ``/proc``."""
        kib = {
            name.rstrip(":"): int(rest[0])
            for name, *rest in map(
                str.split, Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
            )
        }
        return cls(
            threads=len(os.listdir("/proc/self/task")),
            descriptors=len(os.listdir("/proc/self/fd")),
            resident=1024 * kib["Rss"],
            own=1024 * (kib["Private_Clean"] + kib["Private_Dirty"]),
        )


@dataclass
class Calls:
    """How often functions of ``torch.distributed`` are called, and the seconds that they take.

    Attributes:
        count: Calls, by name.
        wall: Seconds, by name, those of waiting included.
        cpu: Seconds of this process's processor, all threads together, by name.
    """

    count: Counter[str] = field(default_factory=Counter)
    wall: Counter[str] = field(default_factory=Counter)
    cpu: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Counts inside."""
        names = (
            *("init_process_group", "new_group", "barrier", "all_reduce", "all_gather"),
            *("all_gather_object", "broadcast_object_list", "broadcast"),
        )
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(patch.object(dist, name, self._timed(name)))
            yield

    def _timed(self, name: str) -> Callable[..., Any]:
        own = getattr(dist, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.process_time()
            try:
                return own(*args, **kwargs)
            finally:
                self.count[name] += 1
                self.wall[name] += time.perf_counter() - wall
                self.cpu[name] += time.process_time() - cpu

        return timed
