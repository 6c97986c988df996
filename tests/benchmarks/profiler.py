"""What StepProfiler costs: batches with and without it, side by side in one run.

    python -m tests.benchmarks.profiler

Runs differ by more than what is measured here, so the first table comes from one run, in which
neighbouring batches are without the profiler, with one that has nothing to do, and with one that
times them, in random order. It has the time that passed and, as other programs on the machine
disturb that, the time for which rank 0's main thread computed. Where the noise is larger than what
is looked for, its own calls tell: how often Lightning calls it in a batch, times what a call takes.
The other tables are of ordinary runs. They show what the batches cost that are counted or
examined, and the report, and what all batches together cost that the profiler looks at: each time
beside as many that follow and are left alone, and with the counted batch in a run's first report.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import lightning as L
import torch
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from lightning_dist import DDPStrategy, PipelineStrategy
from lightning_dist.callbacks import StepProfiler
from lightning_dist.callbacks.loop_profiler import LoopProfiler
from lightning_dist.engine.profiling.meters.recorder import Recorder
from lightning_dist.engine.profiling.step_plan import Role, StepPlan
from lightning_dist.strategies.base.lightning_internals import (
    callbacks_of,
    profiler_of,
    set_callbacks,
    set_profiler,
)
from tests.benchmarks.contestants import CUT, DEPTH, HEADS, WIDTH, PlainGPT, batches
from tests.benchmarks.quiet import QUIET_TRAINER
from tests.helpers.processes.workers import WorkerPool

NEVER, BATCH, ACTIVE, CALLS = 10**6, 4, 10, 40_000
WITHOUT, IDLE, TIMING = "without it", "nothing to do", "timing"
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "1f1b": lambda: PipelineStrategy(num_microbatches=4, partition=CUT),
    "ddp": DDPStrategy,
    "1f1b, 1 stage": PipelineStrategy,
}
ON_TWO = ("1f1b", "ddp")


Times = tuple[float, float]
"""Seconds that passed, and seconds for which the main thread computed."""


def now() -> Times:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter(), time.thread_time()


class Switch(L.Callback):
    """Chooses for each batch which of two profilers there is, and times the batch."""

    def __init__(self, timing: StepProfiler, idle: StepProfiler, first: int) -> None:
        self.idle = idle  # none of the callbacks at first: Trainers take one StepProfiler
        self.profilers = {WITHOUT: [], IDLE: [idle], TIMING: [timing]}
        self.first = first
        self.rounds: list[dict[str, Times]] = []
        self.order: list[str] = []
        self.random = random.Random(0)  # the same on all ranks
        self.mode = TIMING

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.idle.on_train_start(trainer, pl_module)
        idle = profiler_of(trainer)
        assert isinstance(idle, LoopProfiler)
        timing = idle.users
        assert isinstance(timing, LoopProfiler)
        idle.users = timing.users
        self.loops = {WITHOUT: timing.users, IDLE: idle, TIMING: timing}
        self.choose(trainer, TIMING)  # until it times
        self.start = now()

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        end = now()
        if rest[-1] >= self.first:
            wall, cpu = (after - before for after, before in zip(end, self.start, strict=True))
            self.rounds[-1][self.mode] = (wall, cpu)
        if rest[-1] >= self.first - 1:
            if not self.order:
                self.order = self.random.sample([WITHOUT, IDLE, TIMING], 3)
                self.rounds.append({})
            self.choose(trainer, self.order.pop())
        if trainer.is_last_batch:
            self.choose(trainer, WITHOUT)  # who has seen no end of its batches would say so
        self.start = now()

    def choose(self, trainer: L.Trainer, mode: str) -> None:
        self.mode = mode
        others = [c for c in callbacks_of(trainer) if not isinstance(c, StepProfiler)]
        set_callbacks(trainer, [*self.profilers[mode], *others])
        set_profiler(trainer, self.loops[mode])


@dataclass(frozen=True)
class Batch:
    """One batch of an ordinary run: what the profiler did with it, and how long it took."""

    name: str
    seconds: float

    @property
    def is_left_alone(self) -> bool:
        return self.name == Role.NOTHING.value


class Roles(L.Callback):
    """Times batches by what the profiler does with them."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.batches: list[Batch] = []

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        end, index = time.perf_counter(), rest[-1]
        role = self.plan.role(index).value
        if index:
            name = "timed, and report" if self.plan.ends_timing(index) else role
            self.batches.append(Batch(name, end - self.start))
        self.start = end


def fit(
    name: str,
    num_batches: int,
    callbacks: list[L.Callback],
    profiler: Profiler | None = None,
    accelerator: str = "cpu",
    devices: int = 2,
) -> None:
    torch.manual_seed(0)
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=devices,
        strategy=STRATEGIES[name](),
        max_epochs=1,
        callbacks=callbacks,
        profiler=profiler,
        **QUIET_TRAINER,
        limit_val_batches=0,
    )
    loader = DataLoader(batches(num_batches, BATCH), batch_size=BATCH)
    trainer.fit(PlainGPT(width=WIDTH, depth=DEPTH, num_heads=HEADS), loader, loader)


def switched(
    name: str, num_rounds: int, directory: str, accelerator: str = "cpu", devices: int = 2
) -> list[dict[str, Times]]:
    """Runs batches in turns; gives the seconds of each round by mode."""
    warmup = 3
    timing = StepProfiler(2 * NEVER, NEVER, directory, warmup_steps=warmup)
    idle = StepProfiler(2 * NEVER, 1, directory, warmup_steps=NEVER)
    switch = Switch(timing, idle, warmup + 4)
    callbacks = [timing, switch]
    count = warmup + 4 + 3 * num_rounds
    fit(name, count, callbacks, accelerator=accelerator, devices=devices)
    return [found for found in switch.rounds if len(found) == 3]


def by_role(name: str, num_windows: int, directory: str) -> list[Batch]:
    """Runs an ordinary profile, of which every other stretch is left alone; gives its batches."""
    plan = StepPlan(2 * (ACTIVE + 1), ACTIVE, 4)
    profiler = StepProfiler(plan.every_n_steps, ACTIVE, directory, warmup_steps=plan.warmup_steps)
    roles = Roles(plan)
    fit(name, plan.warmup_steps + 1 + plan.every_n_steps * num_windows, [profiler, roles])
    return roles.batches[plan.warmup_steps - 1 :]


def active_shares(batches: list[Batch]) -> list[float]:
    """Tells, for each stretch that is looked at, how much longer it takes than the one after it."""
    stretches = [list(g) for _, g in groupby(batches, lambda batch: batch.is_left_alone)]
    means = [statistics.mean(b.seconds for b in stretch) for stretch in stretches]
    return [active / idle - 1.0 for active, idle in zip(means[::2], means[1::2], strict=True)]


class Counting(Profiler):
    """Counts what Lightning tells."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def start(self, action_name: str) -> None:
        self.count += 1

    def stop(self, action_name: str) -> None:
        self.count += 1


def own_calls(name: str) -> dict[str, float]:
    """Gives the seconds per batch of the calls between loop and profiler, by mode."""
    counting = Counting()
    fit(name, 4, [], counting)
    before, counting.count = counting.count, 0
    fit(name, 8, [], counting)
    per_batch = (counting.count - before) / 4
    loop = LoopProfiler(counting, Recorder(0, torch.device("cpu")), records_steps=True)
    seconds = {}
    for mode in (IDLE, TIMING):
        loop.listens = mode == TIMING
        start = time.thread_time()
        for _ in range(CALLS // 2):  # all of them of the kind that is recorded
            loop.start("[Strategy]S.training_step")
            loop.stop("[Strategy]S.training_step")
        seconds[mode] = (time.thread_time() - start) / CALLS * per_batch
    return seconds


def overhead_table(
    found: dict[str, list[dict[str, Times]]], calls: dict[str, dict[str, float]]
) -> Table:
    table = Table(title="One run, neighbouring batches in random order")
    table.add_column("")
    for heading in ("ms without it", "nothing to do", "timing"):
        table.add_column(heading, justify="right")
    for name, rounds in found.items():
        for clock, title in enumerate(("time", "computing")):
            seconds = [{mode: times[clock] for mode, times in r.items()} for r in rounds]
            median = statistics.median(r[WITHOUT] for r in seconds)
            more = [median_of_pairs(seconds, mode) for mode in (IDLE, TIMING)]
            table.add_row(f"{name}, {title}", f"{median * 1e3:.1f}", *more)
        wall = statistics.median(r[WITHOUT][0] for r in rounds)
        own = [f"{s * 1e3:.3f} ms, {s / wall:.3%}" for s in calls[name].values()]
        table.add_row(f"{name}, its own calls", "", *own)
    return table


def median_of_pairs(rounds: list[dict[str, float]], mode: str) -> str:
    """Tells how much longer a batch takes, with the standard error of the median."""
    return middle_of([r[mode] / r[WITHOUT] - 1.0 for r in rounds])


def middle_of(ratios: list[float]) -> str:
    middle = statistics.median(ratios)
    deviation = statistics.median(abs(r - middle) for r in ratios)
    error = 1.4826 * deviation * 1.2533 / len(ratios) ** 0.5
    return f"{middle:+.2%} ± {error:.2%}"


def role_table(name: str, runs: list[list[Batch]]) -> Table:
    seconds: dict[str, list[float]] = defaultdict(list)
    for batch in (batch for run in runs for batch in run):
        seconds[batch.name].append(batch.seconds)
    plain = statistics.median(seconds[Role.NOTHING.value])
    table = Table(title=f"{name}: batches by role")
    for heading in ("", "batches", "ms, median", "more than nothing"):
        table.add_column(heading, justify="right" if heading else "left")
    for role, values in seconds.items():
        median = statistics.median(values)
        more = f"{(median - plain) * 1e3:+.1f} ms"
        table.add_row(role, str(len(values)), f"{median * 1e3:.1f}", more)
    shares = [active_shares(run) for run in runs]
    firsts, others = [s[0] for s in shares], [share for s in shares for share in s[1:]]
    for title, found in (("first of a run", firsts), ("later", others)):
        table.add_row(f"for a report, {title}", str(len(found)), "", middle_of(found))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--reports", type=int, default=5, help="in each of the runs")
    parser.add_argument("--directory", default="runs/profiler_bench")
    arguments = parser.parse_args()
    pool = WorkerPool()
    found, calls = {}, {}
    roles: dict[str, list[list[Batch]]] = defaultdict(list)
    for name in ON_TWO:
        given = (name, arguments.rounds, arguments.directory)
        found[name] = pool.run(2, switched, *given, timeout=3600)[0]
        calls[name] = pool.run(2, own_calls, name, timeout=600)[0]
        given = (name, arguments.reports, arguments.directory)
        for _ in range(arguments.runs):
            roles[name].append(pool.run(2, by_role, *given, timeout=3600)[0])
    pool.close()
    console = Console(width=100)
    console.print(overhead_table(found, calls))
    for name, runs in roles.items():
        console.print(role_table(name, runs))


if __name__ == "__main__":
    main()
