"""What servers gain over synchronous DDP where a worker is slow, in one run.

A step sleeps, as a step on an accelerator does for the host, and a slow one sleeps longer. Either
one worker is always slow, or each step of each worker is slow with a third of the chance. Each
round runs all contestants, one after the other. What is printed are medians of the rounds' ratios.

    python -m tests.benchmarks.parameter_server --rounds 3
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import lightning as L
from lightning.pytorch.strategies import Strategy
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_dist import DDPStrategy, ParameterServerStrategy
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_trainer,
    share_of,
)
from tests.helpers.processes.workers import WorkerPool

WORKERS, STEPS = 3, 60
SECONDS, SLOW_SECONDS = 0.02, 0.1
STRAGGLERS = ("always the last", "each, by chance")
DDP = "DDPStrategy"
CONTESTANTS: dict[str, Callable[[], Strategy]] = {
    DDP: DDPStrategy,
    "sync": partial(ParameterServerStrategy, "sync"),
    "bounded, 4": partial(ParameterServerStrategy, "bounded", 4),
    "async": partial(ParameterServerStrategy, "async"),
}


class Sleeping(Classifier):
    """Sleeps in each step."""

    straggler: str

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rank = int(os.environ["RANK"])
        is_slow = rank == WORKERS - 1
        if self.straggler != STRAGGLERS[0]:
            is_slow = Random(f"{rank}/{batch_idx}").random() < 1 / WORKERS
        time.sleep(SLOW_SECONDS if is_slow else SECONDS)
        return super().training_step(batch, batch_idx)


class Clock(L.Callback):
    """Notes when each step ends."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.times.append(time.time())


def fit(name: str, straggler: str) -> list[float]:
    module, clock = make_module(Sleeping), Clock()
    module.straggler = straggler
    trainer = make_trainer(devices=WORKERS, strategy=CONTESTANTS[name](), callbacks=[clock])
    rank = int(os.environ["RANK"])
    trainer.fit(module, share_of(rank, 4 * STEPS * WORKERS, WORKERS), make_loader(8))
    return clock.times


def rates_of(ranks: list[list[float]]) -> tuple[float, float]:
    """Returns gradients per second: of the whole epoch, and while all workers train."""
    begin, end = max(times[0] for times in ranks), min(times[-1] for times in ranks)
    last = max(times[-1] for times in ranks)
    together = sum(begin < t <= end for times in ranks for t in times)
    whole = sum(begin < t <= last for times in ranks for t in times)
    return whole / (last - begin), together / (end - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    pool = WorkerPool()
    rates: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for straggler in STRAGGLERS:
            for name in CONTESTANTS:
                found = rates_of(pool.run(WORKERS, fit, name, straggler, timeout=120.0))
                rates.setdefault((straggler, name), []).append(found)
    pool.close()
    table = Table(
        title=f"{WORKERS} workers, {STEPS} steps of {SECONDS:g} s, slow ones of {SLOW_SECONDS:g} s"
    )
    for heading in ("slow", "", "while all train, x DDP", "the whole epoch, x DDP"):
        table.add_column(heading)
    for (straggler, name), own in rates.items():
        pairs = list(zip(own, rates[straggler, DDP], strict=True))
        ratios = [statistics.median(a[i] / b[i] for a, b in pairs) for i in (1, 0)]
        table.add_row(straggler, name, *(f"{ratio:.2f}" for ratio in ratios))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
