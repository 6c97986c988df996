"""What moving layers buys, beside what was promised: ``python -m tests.benchmarks.balance``.

Not a test: it prints a table. A lopsided model begins with the cut by parameters; StageBalancer
times its layers, moves them, and times them again. In one run are steps before and after the move,
and steps with and without the hooks that time layers, so a machine whose speed drifts is fair to
all of them. The table shows medians over the runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_dist import PipelineStrategy
from lightning_dist.callbacks import StageBalancer
from lightning_dist.engine.planning.balance import Balance
from lightning_dist.engine.planning.layer_costs import StepCosts
from tests.benchmarks.quiet import QUIET_TRAINER, quieten
from tests.benchmarks.sleeping import Sleep
from tests.helpers.processes.workers import WorkerPool

WARMUP, EVERY, TIMED = 3, 12, 6
BATCHES = WARMUP + 4 * EVERY
WIDTH, LENGTH, VOCABULARY = 128, 64, 8192


class SleepingBlock(nn.Module):
    """Sleeps, twice as long in its backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x + self.shift, self.seconds, 2 * self.seconds)  # type: ignore[no-any-return]


class Block(nn.Module):
    """An MLP with a skip."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Sleeping(L.LightningModule):
    """Twelve blocks of as many parameters, of which the first sleeps four times as long."""

    def __init__(self) -> None:
        super().__init__()
        seconds = [0.012, *[0.003] * 11]
        self.model = nn.Sequential(*map(SleepingBlock, seconds))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    @staticmethod
    def data(count: int) -> TensorDataset:
        return TensorDataset(torch.ones(count * 8, 4))


class Real(Sleeping):
    """An embedding of many parameters and little work, and blocks, the last four times as wide."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        torch.manual_seed(0)
        blocks = [Block(WIDTH, 4 * WIDTH * (4 if i == 5 else 1)) for i in range(6)]
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, 64))

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())

    @staticmethod
    def data(count: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(0, VOCABULARY, (count * 16, LENGTH), generator=generator)
        return TensorDataset(x, x % 64)


CASES: dict[str, tuple[type[Sleeping], int, int, int]] = {
    "sleeping, 4 stages": (Sleeping, 4, 8, 8),
    "real, 2 stages": (Real, 2, 16, 4),
}
"""The module, stages, samples and micro-batches of a batch."""


OfRank = tuple[list[float], list[float], list[Balance]]
"""Seconds of each batch, the processor's of them, and reports."""


class Watch(L.Callback):
    """Times each batch on its rank, and keeps the reports; comes before the balancer."""

    def __init__(self, balancer: StageBalancer) -> None:
        self.balancer = balancer
        self.reports: list[Balance] = []
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self._start = self._cpu_start = 0.0

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        newest = self.balancer.balance
        if newest is not None and newest not in self.reports:
            self.reports.append(newest)
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        self.cpu_seconds.append(time.process_time() - self._cpu_start)


@dataclass(frozen=True)
class Run:
    """What one run has shown; seconds are of a batch, the slowest rank's.

    What timing layers costs is told by the processor's time, which others on the machine hardly
    change.
    """

    before: float
    after: float
    extra_cpu: float
    reports: tuple[Balance, ...]


def train(name: str) -> OfRank:
    """Trains on this worker."""
    quieten()
    module, num_stages, size, count = CASES[name]
    balancer = StageBalancer(EVERY, WARMUP, TIMED, min_gain=0.05, action="rebalance")
    watch = Watch(balancer)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_stages,
        strategy=PipelineStrategy(num_microbatches=count),
        max_epochs=1,
        callbacks=[watch, balancer],  # so that a report is not in the time of its batch
        **QUIET_TRAINER,
        limit_val_batches=0,
    )
    loader = DataLoader(module.data(BATCHES), batch_size=size)
    trainer.fit(module(), loader, loader)
    return watch.seconds, watch.cpu_seconds, watch.reports


def run_of(ranks: list[OfRank]) -> Run:
    steps = [max(of_ranks) for of_ranks in zip(*(rank[0] for rank in ranks), strict=True)]
    reports = ranks[0][2]
    before, (_, after) = steps[WARMUP + 1 : WARMUP + TIMED], windows_of(steps)
    extra = []
    for _, cpu_seconds, _ in ranks:
        timed, plain = windows_of(cpu_seconds)
        extra.append(statistics.median(timed) - statistics.median(plain))
    return Run(
        before=statistics.median(before),
        after=statistics.median(after),
        extra_cpu=max(extra),
        reports=(reports[0], reports[-1]),
    )


def windows_of(batches: list[float]) -> tuple[list[float], list[float]]:
    """Gives what belongs to batches whose layers were timed, and to others, after the move."""
    windows = [batches[begin : begin + EVERY] for begin in range(WARMUP + EVERY, BATCHES, EVERY)]
    # A batch after a report is not one to compare with, nor one after a move.
    timed = [value for window in windows for value in window[1:TIMED]]
    return timed, [value for window in windows for value in window[TIMED + 1 :]]


def bottleneck(costs: StepCosts, cut: tuple[int, ...]) -> float:
    stages = costs.of_stages(cut)
    return max(f + b for f, b in zip(stages.forward_seconds, stages.backward_seconds, strict=True))


def optimum(costs: StepCosts, num_stages: int) -> float:
    """Looks at all cuts."""
    count = len(costs.layers)
    found = []
    for ends in combinations(range(1, count), num_stages - 1):
        places = (0, *ends, count)
        cut = tuple(b - a for a, b in zip(places, places[1:], strict=False))
        found.append(bottleneck(costs, cut))
    return min(found)


COLUMNS: dict[str, Callable[[Run], float]] = {
    "ms before": lambda r: r.before * 1e3,
    "promised": lambda r: r.reports[0].step_seconds * 1e3,
    "ms after": lambda r: r.after * 1e3,
    "promised ": lambda r: r.reports[0].better_step_seconds * 1e3,
    "throughput x": lambda r: r.before / r.after,
    "promised x": lambda r: r.reports[0].step_seconds / r.reports[0].better_step_seconds,
    "of the optimum": lambda r: (
        bottleneck(r.reports[1].costs, r.reports[0].better_cut)
        / optimum(r.reports[1].costs, len(r.reports[0].cut))
    ),
    "before": lambda r: (
        bottleneck(r.reports[1].costs, r.reports[0].cut)
        / optimum(r.reports[1].costs, len(r.reports[0].cut))
    ),
    "timing costs, CPU ms": lambda r: r.extra_cpu * 1e3,
    "% of a step": lambda r: r.extra_cpu / r.after * 100,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each model")
    options = parser.parse_args()
    workers = WorkerPool()
    runs: dict[str, list[Run]] = {name: [] for name in CASES}
    try:
        for name in track([n for _ in range(options.rounds) for n in CASES], description="balance"):
            runs[name].append(run_of(workers.run(CASES[name][1], train, name, timeout=300)))
    finally:
        workers.close()
    table = Table(title=f"From the cut by parameters to the better one, {options.rounds} runs")
    for heading in ("", *CASES):
        table.add_column(heading, justify="left" if not heading else "right")
    firsts = [of_case[0].reports[0] for of_case in runs.values()]
    table.add_row("first run, from", *(str(list(report.cut)) for report in firsts))
    table.add_row("to", *(str(list(report.better_cut)) for report in firsts))
    for heading, value in COLUMNS.items():
        medians = [statistics.median(map(value, of_case)) for of_case in runs.values()]
        table.add_row(heading, *(f"{median:.3g}" for median in medians))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
