"""Real ranks: they train layers that sleep, and count what that takes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import DDPStrategy, FSDPStrategy, MeshStrategy, PipelineStrategy
from lightning_dist.engine.planning.traffic import Traffic
from lightning_dist.engine.profiling.meters.step_counter import StepCounter
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.wrap import EachBlock
from tests.benchmarks.quiet import QUIET_TRAINER, quieten
from tests.benchmarks.scaling.layouts import LAYERS, LAYOUTS, Layout
from tests.benchmarks.scaling.meters import Calls, Footprint, Sent
from tests.benchmarks.scaling.paper import Sizes
from tests.benchmarks.sleeping import SleepingLayer

WIDTH = 1024
SLEEP_SECONDS = 0.0005
SIZES = Sizes(layer_bytes=2 * 4 * WIDTH, row_bytes=4 * WIDTH, rows=16)
WARMUP, COUNTED = 12, 8
"""Batches: those after the pipeline has filled, and FSDP has looked for unused parameters."""


class SleepingModel(L.LightningModule):
    """As many layers as a layout wants."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        layers = (SleepingLayer(SLEEP_SECONDS, (WIDTH,)) for _ in range(num_layers))
        self.model = nn.Sequential(*layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        loss: Tensor = self.model(x).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def strategy_of(layout: Layout, num_ranks: int) -> Any:
    """Creates the strategy that a user would write."""
    mesh, count = layout.mesh(num_ranks), layout.microbatches(SIZES.rows)
    if mesh.dp_shard > 1:
        return FSDPStrategy(wrap=EachBlock())
    if not layout.schedule:
        return DDPStrategy()
    if mesh.data_size == 1:
        return PipelineStrategy(schedule=layout.schedule, num_microbatches=count)
    pipeline = PipelineConfig(schedule=layout.schedule, num_microbatches=count)
    return MeshStrategy(pp=mesh.pp, dp_replicate=mesh.dp_replicate, dp_shard=1, pipeline=pipeline)


@dataclass(frozen=True)
class RankCost:
    """What a run has taken a rank.

    Attributes:
        start: Seconds of the clock and of the processor, from the Trainer's begin to each moment.
        calls: Of ``torch.distributed``.
        groups: Process groups that the rank is in after the first step.
        sent_at_start: Until the first step has ended.
        before: What it held before the Trainer.
        after: What it held after the counted steps.
        segments: TCP segments that it sent in a step.
        num_bytes: Bytes that it sent in a step.
        traffic: What torch has dispatched in a step; a batch travels between two of them.
    """

    start: dict[str, tuple[float, float]]
    calls: Calls
    groups: int
    sent_at_start: Sent
    before: Footprint
    after: Footprint
    segments: float
    num_bytes: float
    traffic: tuple[Traffic, ...]


class Watch(L.Callback):
    """Notes when each part of the start is over, and what some later steps send."""

    def __init__(self, layout: Layout, num_ranks: int) -> None:
        self._mesh = layout.mesh(num_ranks)
        self._first = max(WARMUP, num_ranks)
        self._last = self._first + COUNTED
        self._began = time.perf_counter(), time.process_time()
        self.num_batches = self._last + 1 + num_ranks  # the batches that are read ahead, too
        self.counter: StepCounter | None = None
        self.start: dict[str, tuple[float, float]] = {}
        self.calls = Calls()
        self.groups = 0
        self.before = self.after = Footprint.now()
        self.sent: list[Sent] = []

    def note(self, moment: str) -> None:
        began = self._began
        self.start[moment] = time.perf_counter() - began[0], time.process_time() - began[1]

    def setup(self, *_: Any, **__: Any) -> None:
        self.note("ranks have met")

    def on_fit_start(self, *_: Any) -> None:
        self.note("model is placed")

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx in (self._first, self._last):
            self.sent.append(Sent.so_far())
        if batch_idx == self._last:
            self.after = Footprint.now()
            self.counter = StepCounter(self._mesh, module.parameters())
            self.counter.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, out: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            self.note("first step")
            self.sent.append(Sent.so_far())
            self.groups = len(dist.distributed_c10d._world.pg_map)
        if batch_idx == self._last and self.counter is not None:
            self.counter.stop()


def on_rank(name: str, num_ranks: int) -> RankCost:
    """Trains with a layout, on one rank."""
    quieten()
    layout = LAYOUTS[name]
    watch = Watch(layout, num_ranks)
    rows = TensorDataset(torch.ones(SIZES.rows * watch.num_batches, WIDTH))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy_of(layout, num_ranks),
        max_epochs=1,
        callbacks=[watch],
        **QUIET_TRAINER,
    )
    model = SleepingModel(LAYERS * layout.num_stages(num_ranks))
    with watch.calls.watching():
        trainer.fit(model, DataLoader(rows, batch_size=SIZES.rows))
    at_start, begin, end = watch.sent
    assert watch.counter is not None
    return RankCost(
        watch.start,
        watch.calls,
        watch.groups,
        at_start,
        watch.before,
        watch.after,
        (end.segments - begin.segments) / COUNTED,
        (end.num_bytes - begin.num_bytes) / COUNTED,
        watch.counter.count(1, 1).traffic,
    )
