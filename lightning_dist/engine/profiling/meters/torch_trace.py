"""Write torch's own trace of some steps of this rank."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import profile

from lightning_dist.engine.profiling.meters.collective_trace import activities


class TorchTrace:
    """Traces from :meth:`start` to :meth:`write`.

    Args:
        device: Where this rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profile: profile | None = None

    def start(self) -> None:
        """Begins."""
        # There is one cycle, and torch before 2.13 warns even so that others' events get lost.
        self._profile = profile(activities=activities(self._device), acc_events=True)
        self._profile.start()

    def stop(self) -> None:
        """Ends; also where nothing has begun."""
        if self._profile is not None:
            self._profile.stop()

    def write(self, path: Path) -> None:
        """Writes what was seen, for Perfetto.

        Args:
            path: A file; its ending may be .json or .json.gz.
        """
        assert self._profile is not None
        self._profile.export_chrome_trace(str(path))
        self._profile = None
