"""Measures the most memory that operations take at a time, temporary tensors included.

Saved tensors are counted by hooks (:mod:`.meters.memory`). Temporary ones pass no hook, so what the
allocator reports is read.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch.autograd.profiler import profile as autograd_profile
from torch.profiler import record_function

from lightning_dist.engine.tensors.observers import is_profiling

_MEMORY = "[memory]"  # Kineto's name of an allocation, and of its end
_MARK = "lightning_dist::mark "


class PeakMeter:
    """Counts what torch allocates between marks, beyond what is there at a start.

    A GPU's allocator counts by itself. A CPU's reports to torch's profiler, of which there can be
    only one: while another one runs, nothing is counted.

    Args:
        device: The device.

    Attributes:
        peaks: Most bytes at a time from each mark to the next, by what the mark is of, once the
            meter is left; of several marks of the same, the most.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Hashable] = []
        self._before = 0
        self._profile: autograd_profile | None = None
        self.peaks: dict[Hashable, int] = {}

    def __enter__(self) -> PeakMeter:
        """Makes ready to count."""
        if self._device.type == "cpu" and not is_profiling():
            # It reads this at its first use; else it prints when it starts and stops.
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
            self._profile = autograd_profile(use_kineto=True, profile_memory=True)
            self._profile.__enter__()
        return self

    def start(self, of: Hashable) -> None:
        """Begins to count anew; what is there now does not count."""
        self.mark(None)
        if self._device.type == "cuda":
            self._before = torch.cuda.memory_allocated(self._device)
        self.mark(of)

    def mark(self, of: Hashable) -> None:
        """Ends what was before, and says what follows; None is not counted."""
        if self._device.type == "cuda":
            if self._marks and self._marks[-1] is not None:
                peak = torch.cuda.max_memory_allocated(self._device) - self._before
                self._note(self._marks[-1], peak)
            torch.cuda.reset_peak_memory_stats(self._device)
        with record_function(f"{_MARK}{len(self._marks)}"):
            self._marks.append(of)

    def __exit__(self, *_: object) -> None:
        """Ends the counting."""
        self.mark(None)
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            found, self._profile = self._profile.kineto_results, None
            assert found is not None
            self._count(found.events())

    def _count(self, events: Iterable[Any]) -> None:
        now: Hashable = None
        held = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            if event.name().startswith(_MARK):
                now = self._marks[int(event.name().removeprefix(_MARK))]
            elif event.name() == _MEMORY:
                held += event.nbytes()
            if now is None:
                held = 0
            else:
                self._note(now, held)

    def _note(self, of: Hashable, num_bytes: int) -> None:
        self.peaks[of] = max(self.peaks.get(of, 0), num_bytes)
