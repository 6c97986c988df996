"""Saves that a thread writes while training goes on.

A save holds up training while the tensors are copied, by torch's stager: into host memory, which
is pinned if they are on a GPU, and kept for the next save with torch 2.13. ``dcp.async_save`` does
so, too, but its thread would write the shards alone, and a save goes on behind them, on all ranks;
see :mod:`.joint_save`. So the thread is this module's, and the whole save runs in it. Its
collectives need a process group of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import torch
import torch.distributed as dist


class BackgroundSaves:
    """Writes the checkpoints of a run, one at a time, on a thread with a gloo group of its own."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        # Here, for the module takes long to import, and most runs do not need it.
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.group = group
        is_on_gpu = device.type == "cuda"
        options = StagingOptions(
            use_pinned_memory=is_on_gpu,
            use_non_blocking_copy=is_on_gpu,
            use_shared_memory=False,  # no other process writes
            use_async_staging=False,  # the next update would have to wait for it
        )
        self._make_stager = partial(DefaultStager, options)
        self._stager = self._make_stager()
        # torch's writer asks for the current device, which is the thread's own.
        set_device = torch.get_device_module(device).set_device
        self._thread = ThreadPoolExecutor(1, "checkpoint", set_device, (device,))
        self._steps: list[Future[None]] = []

    def copy(self, state: Any) -> Any:
        """Copies a tree of tensors and other values; the copy before is overwritten."""
        assert not self._steps, "the copy before may still be written"
        if torch.__version__ < "2.13":  # there a stager closes itself when it has copied once
            self._stager = self._make_stager()
        return self._stager.stage(state)

    def start(self, write: Callable[[], None]) -> None:
        """Begins a save in the thread; the save before must have been finished."""
        assert not self._steps
        self._steps = [self._thread.submit(write)]

    def then(self, action: Callable[[], None]) -> None:
        """Runs an action when the save is done, on the thread; not at all if the save fails."""
        if not self._steps:
            action()
            return
        before = self._steps[-1]

        def run() -> None:
            before.result()
            action()

        self._steps.append(self._thread.submit(run))

    def wait(self) -> None:
        """Waits for the save and the actions behind it, and leaves their errors to `finish`."""
        wait(self._steps)

    def finish(self) -> None:
        """Waits for the save and the actions behind it, and raises the error of one, once."""
        steps, self._steps = self._steps, []
        wait(steps)
        for step in steps:
            step.result()

    def close(self) -> None:
        """Ends the thread and frees the copy; raises as :meth:`finish`."""
        self._thread.shutdown()
        self._stager.close()
        self.finish()
