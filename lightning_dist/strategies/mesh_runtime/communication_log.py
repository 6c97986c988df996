"""Log the bytes and waits of data replicas; see ``DDPStrategy(log_communication=True)``.

The log is a callback, for a step's forward, backward and update begin and end at Lightning's hooks.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.engine.data_parallel.meter import CommunicationMeter
from lightning_dist.engine.pipeline.measurements import MeasuredTimelines
from lightning_dist.engine.profiling.meters.recorder import Recorder
from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.timeline import SpanKind

BYTES = "communication/bytes"
WAITING_SHARE = "communication/waiting_share"


class CommunicationLog(pl.Callback):
    """Records one rank's steps.

    Args:
        rank: This rank.
        device: The device, which chooses the clock.
        group: A gloo group of all ranks.

    Attributes:
        recorder: Records this rank's spans.
        meter: Counts the bytes that are sent.
        timelines: The timelines of all ranks, when training has ended.
    """

    def __init__(self, rank: int, device: torch.device, group: dist.ProcessGroup) -> None:
        self.recorder = Recorder(rank, device)
        self._group = group
        self._batch_start: Any = None
        self._since: Any = None
        self._updating = False
        self.meter = CommunicationMeter(self.recorder)
        self.timelines = MeasuredTimelines([])

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch_start = self._since = self.recorder.mark()
        self.meter.update = trainer.global_step

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        self._compute(trainer, ActionKind.FORWARD)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._compute(trainer, ActionKind.BACKWARD, self.meter.end_backward())

    def _compute(self, trainer: pl.Trainer, kind: ActionKind, end: Any = None) -> None:
        action = Action(0, kind, trainer.fit_loop.total_batch_idx)
        self.recorder.record(SpanKind.COMPUTE, action, self._since, end)
        self._since = self.recorder.mark()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self._since = self.recorder.mark()
        self._updating = True

    def end_update(self) -> None:
        """Ends an update, after which weights may still be averaged."""
        if self._updating:
            action = Action(0, ActionKind.STEP, self.meter.update)
            self.recorder.record(SpanKind.UPDATE, action, self._since)
        self._updating = False

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self.end_update()
        seconds = self.recorder.seconds
        step_seconds = seconds(self.recorder.mark()) - seconds(self._batch_start)
        num_bytes, waited_seconds = self.meter.take()
        # In double precision, which holds the count of bytes of any model.
        values = {BYTES: num_bytes, WAITING_SHARE: waited_seconds / step_seconds}
        for name, value in values.items():
            pl_module.log(name, torch.tensor(value, dtype=torch.float64), batch_size=1)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.recorder.interrupt()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, self.recorder.stretches(), group=self._group)
        self.timelines = MeasuredTimelines(everyone)
