"""Times of two loops that take turns in the same processes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist


@dataclass(frozen=True)
class Clocks:
    """Seconds on the wall, and seconds in which threads of this process computed."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Clocks:
        return cls(time.perf_counter(), time.process_time())

    def __sub__(self, earlier: Clocks) -> Clocks:
        return Clocks(self.wall - earlier.wall, self.cpu - earlier.cpu)


@dataclass
class TurnTimes:
    """What each turn has taken.

    Attributes:
        turn: Batches of a turn.
        warmup_turns: Those that are not counted.
        own: Turns of what is measured; number n comes right before number n of the raw loop.
        raw: Turns of the raw loop.
    """

    turn: int
    warmup_turns: int
    own: list[Clocks] = field(default_factory=list)
    raw: list[Clocks] = field(default_factory=list)

    @contextmanager
    def measuring(self, turns: list[Clocks]) -> Iterator[None]:
        """Adds the turn inside, from when all ranks have met to when they meet again."""
        dist.barrier()
        began = Clocks.now()
        yield
        dist.barrier()
        turns.append(Clocks.now() - began)

    def ratios(self) -> list[float]:
        """Gives the throughput of each own turn beside that of its neighbours."""
        own, raw = ([turn.wall for turn in turns] for turns in (self.own, self.raw))
        numbers = range(self.warmup_turns, len(raw))
        return [(raw[n - 1] + raw[n]) / 2 / own[n] for n in numbers]

    def milliseconds(self) -> tuple[float, float]:
        """Gives medians of a batch, own and the raw loop's."""
        return self._medians(lambda turn: turn.wall)

    def computing_milliseconds(self) -> tuple[float, float]:
        """Gives medians of a batch, in which threads of this process computed."""
        return self._medians(lambda turn: turn.cpu)

    def _medians(self, clock: Callable[[Clocks], float]) -> tuple[float, float]:
        begin = self.warmup_turns
        own, raw = (statistics.median(map(clock, v[begin:])) for v in (self.own, self.raw))
        return 1e3 * own / self.turn, 1e3 * raw / self.turn
