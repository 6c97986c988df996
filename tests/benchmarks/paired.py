"""Strategies beside raw loops in the same processes: ``python -m tests.benchmarks.paired``.

Not a test. Runs that follow each other by a minute differ by ten per cent on a shared machine,
which hides what the strategies cost. Here a fit and a raw loop on a model of its own take turns of
a few batches in the same processes, and each of the fit's turns is compared with the two of the raw
loop around it. A turn ends with all of its batches, so an asynchronous pipeline fills and drains in
each: its turns are of many batches, and its raw loop is two processes that never speak. The pairs
of the "engine" have no Trainer: both sides are plain loops.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.strategies import ModelParallelStrategy
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_dist import (
    DDPStrategy,
    FSDPStrategy,
    MeshStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from tests.benchmarks import contestants as c
from tests.benchmarks import data_parallel as d
from tests.benchmarks import peers as p
from tests.benchmarks import tensor_parallel as t
from tests.benchmarks import two_axes as a
from tests.benchmarks.plain import PlainPipeline
from tests.benchmarks.quiet import quieten
from tests.benchmarks.turns import Clocks, TurnTimes
from tests.helpers.processes.workers import WorkerPool

TURN = 4
"""Batches; a multiple of those accumulated."""
LONG_TURN = 100
WARMUP_BATCHES = 12
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Pair:
    """A strategy and what it is to be as fast as.

    Attributes:
        strategy: Makes it.
        loop: Makes the raw loop of a rank.
        size: Samples of a rank's batch.
        module_class: What is fitted.
        accumulate: Batches per update.
        devices: Processes.
        turn: Batches of a turn.
    """

    strategy: Callable[[], Any]
    loop: Callable[[int], c.RunBatch]
    size: int = c.BATCH
    module_class: type[c.PlainGPT] = c.PlainGPT
    accumulate: int = 1
    devices: int = 2
    turn: int = TURN

    @property
    def warmup_turns(self) -> int:
        """Those that are not counted."""
        return math.ceil(WARMUP_BATCHES / self.turn)

    def take_turns(self, rank: int, num_turns: int) -> TurnTimes:
        """Runs the fit and the raw loop on this rank."""
        count = self.turn * (num_turns + self.warmup_turns) + 1
        data = c.batches(count + self.turn, self.size)
        batches = iter(DataLoader(data, batch_size=self.size))
        turns = Turns(self, lambda: self.loop(rank), batches)
        how = self.size, self.module_class, self.accumulate, self.devices
        c.fit(self.strategy(), count, turns, *how)
        return turns.times


@dataclass(frozen=True)
class PlainPair:
    """The engine's pipeline in a plain loop, and what it is to be as fast as.

    Attributes:
        schedule: Name of its schedule.
        num_microbatches: Those of a batch.
        loop: Makes the raw loop of a rank.
        turn: Batches of a turn.
        devices: Processes.
    """

    schedule: str
    num_microbatches: int
    loop: Callable[[int], c.RunBatch]
    turn: int = TURN
    devices: int = 2

    def take_turns(self, rank: int, num_turns: int) -> TurnTimes:
        """Runs both loops on this rank."""
        dist.init_process_group("gloo")
        own, loop = PlainPipeline(rank, self.schedule, self.num_microbatches), self.loop(rank)
        times = TurnTimes(self.turn, math.ceil(WARMUP_BATCHES / self.turn))
        data = c.batches(self.turn * (num_turns + times.warmup_turns))
        batches = iter(DataLoader(data, batch_size=c.BATCH))
        while turn := list(islice(batches, self.turn)):
            with times.measuring(times.own):
                for x, y in turn:
                    own.run(x, y)
                own.drain()
            with times.measuring(times.raw):
                for x, y in turn:
                    loop(x, y)
        own.close()
        return times


def _pipeline(schedule: str, loop: Callable[[int], c.RunBatch]) -> Pair:
    return Pair(lambda: c.our_pipeline(schedule, 4), loop)


def _asynchronous(
    schedule: str,
    num_microbatches: int,
    loop: Callable[[int], c.RunBatch] = c.ideal_loop,
    **options: Any,
) -> Pair:
    return Pair(lambda: c.our_pipeline(schedule, num_microbatches, **options), loop, turn=LONG_TURN)


def _listed(schedule: str) -> Pair:
    return _pipeline(schedule, lambda rank: c.listed_loop(rank, schedule, 4))


def _plain(
    schedule: str, loop: Callable[[int], c.RunBatch], num_microbatches: int = 4, turn: int = TURN
) -> PlainPair:
    return PlainPair(schedule, num_microbatches, loop, turn)


def _listed_plain(schedule: str) -> PlainPair:
    return _plain(schedule, lambda rank: c.listed_loop(rank, schedule, 4))


PAIRS: dict[str, Pair | PlainPair] = {
    "gpipe, m=4": _pipeline("gpipe", lambda rank: c.pipelining_loop(rank, ScheduleGPipe, 4)),
    "1f1b, m=4": _pipeline("1f1b", lambda rank: c.pipelining_loop(rank, Schedule1F1B, 4)),
    **{f"{schedule}, m=4": _listed(schedule) for schedule in c.LISTED},
    f"1f1b, m=4, beside {p.DEEPSPEED_1F1B}": _pipeline(
        "1f1b", lambda rank: p.deepspeed_loop(rank, 4)
    ),
    "pipedream beside torch 1F1B, m=4": _asynchronous(
        "pipedream", 1, loop=lambda rank: c.pipelining_loop(rank, Schedule1F1B, 4)
    ),
    "pipedream beside torch zbv, m=4": _asynchronous(
        "pipedream", 1, loop=lambda rank: c.listed_loop(rank, "zbv", 4)
    ),
    "pipedream beside the ideal": _asynchronous("pipedream", 1),
    "pipedream_2bw, m=2, beside the ideal": _asynchronous("pipedream_2bw", 2),
    "pipedream_2bw, m=2, predicting, beside the ideal": _asynchronous(
        "pipedream_2bw", 2, staleness_correction="predict"
    ),
    "engine: gpipe, m=4": _plain("gpipe", lambda rank: c.pipelining_loop(rank, ScheduleGPipe, 4)),
    "engine: 1f1b, m=4": _plain("1f1b", lambda rank: c.pipelining_loop(rank, Schedule1F1B, 4)),
    **{f"engine: {schedule}, m=4": _listed_plain(schedule) for schedule in c.LISTED},
    "engine: pipedream beside the ideal": _plain("pipedream", c.ideal_loop, 1, LONG_TURN),
    "engine: pipedream_2bw, m=2, beside the ideal": _plain(
        "pipedream_2bw", c.ideal_loop, 2, LONG_TURN
    ),
    "DDPStrategy": Pair(DDPStrategy, lambda _: d.ddp_loop(), d.SHARE),
    d.LIGHTNINGS_DDP: Pair(LightningDDPStrategy, lambda _: d.ddp_loop(), d.SHARE),
    "FSDPStrategy": Pair(FSDPStrategy, lambda _: d.fsdp_loop(1), d.SHARE),
    "FSDPStrategy, accumulate 4": Pair(
        FSDPStrategy, lambda _: d.fsdp_loop(4), d.SHARE, accumulate=4
    ),
    d.LIGHTNINGS_FSDP: Pair(
        lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        lambda _: d.fsdp_loop(1),
        d.SHARE,
        d.ShardedGPT,
    ),
    d.LIGHTNINGS_FSDP_4: Pair(
        lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        lambda _: d.fsdp_loop(4),
        d.SHARE,
        d.ShardedGPT,
        accumulate=4,
    ),
    "TensorParallelStrategy": Pair(
        lambda: TensorParallelStrategy(plan=t.PLAN),
        lambda _: t.tensor_parallel_loop(),
        module_class=t.UnfusedGPT,
    ),
    "MeshStrategy, 2-D": Pair(
        lambda: MeshStrategy(dp_shard=2, tp=2, tensor=TensorConfig(plan=t.PLAN)),
        lambda _: a.loop_2d(),
        d.SHARE,
        t.UnfusedGPT,
        devices=a.NUM_PROCESSES,
    ),
}


class Turns(L.Callback):
    """Lets a raw loop run between a fit's batches.

    Args:
        pair: What takes turns.
        make_loop: Makes the raw loop, when there is a process group.
        batches: For it.
        device: The device on which both compute.
    """

    def __init__(
        self,
        pair: Pair,
        make_loop: Callable[[], c.RunBatch],
        batches: Iterator[tuple[Tensor, Tensor]],
        device: torch.device = CPU,
    ) -> None:
        self._device = device
        self._pair = pair
        self._make_loop = make_loop
        self._batches = batches
        self._loop: c.RunBatch | None = None
        self._began = Clocks.now()
        self.times = TurnTimes(pair.turn, pair.warmup_turns)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % self._pair.turn == 0:
            if isinstance(trainer.strategy, PipelineStrategy):
                trainer.strategy.drain()
            self._meet()
            self.times.own.append(Clocks.now() - self._began)
            self._take_turn()
            self._began = Clocks.now()

    def _take_turn(self) -> None:
        loop = self._loop = self._loop or self._make_loop()
        began = Clocks.now()
        with torch.enable_grad():
            for _ in range(self._pair.turn):
                loop(*next(self._batches))
        self._meet()
        self.times.raw.append(Clocks.now() - began)

    def _meet(self) -> None:
        """Waits for the device, and for the other ranks if there are some."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if dist.is_initialized():
            dist.barrier()


def on_rank(
    name: str, num_turns: int
) -> tuple[list[float], tuple[float, float], tuple[float, float]]:
    """Runs one pair on this worker."""
    quieten()
    times = PAIRS[name].take_turns(int(os.environ["RANK"]), num_turns)
    return times.ratios(), times.milliseconds(), times.computing_milliseconds()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    turns = f"of {TURN} batches each; of {LONG_TURN} for what is asynchronous"
    parser.add_argument("--turns", type=int, default=25, help=turns)
    parser.add_argument("--only", default="", help="pairs whose name contains one of these, by |")
    options = parser.parse_args()
    table = Table(title="Fits, and plain loops of the engine, beside raw loops, in turns")
    beside = ("ms per batch", "raw loop", "x raw loop", "half of the turns")
    for heading in ("", *beside, "CPU ms, all ranks", "raw loop"):
        table.add_column(heading, justify="right" if heading else "left")
    names = [name for name in PAIRS if any(w in name for w in options.only.split("|"))]
    raw_loops = [name.rpartition("beside ")[2] for name in names]
    p.print_missing(raw_loops)
    names = [n for n, loop in zip(names, raw_loops, strict=True) if not p.missing_package(loop)]
    workers = WorkerPool()
    try:
        for name in track(names, description="pairs"):
            count = PAIRS[name].devices
            results = workers.run(count, on_rank, name, options.turns, timeout=1800)
            ratios, walls, _ = results[0]
            cpus = [sum(cpu) for cpu in zip(*(cpus for *_, cpus in results), strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            spread = f"{low:.3f} - {high:.3f}"
            shown = [f"{milliseconds:.0f}" for milliseconds in (*walls, *cpus)]
            table.add_row(name, *shown[:2], f"{middle:.3f}", spread, *shown[2:])
    finally:
        workers.close()
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
