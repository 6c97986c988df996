"""How long a save holds up training: ``python -m tests.benchmarks.saving``.

Not a test. Two ranks train a model of 104 MB of weights with AdamW, so that a checkpoint has
313 MB, and save it behind every third batch, when the save before is done. ``async_save=False`` and
``True`` take turns in the same processes. A stall is the time from the call of ``save_checkpoint``
to its return. The thread that writes takes processor time from the steps on a CPU, which is not
counted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import FSDPStrategy, PipelineStrategy
from tests.benchmarks.quiet import quieten
from tests.helpers.networks.models import make_trainer
from tests.helpers.processes.workers import WorkerPool

WIDTH, DEPTH = 1140, 20  # 26 million weights
BATCH = 32
EVERY = 3
SAVES = 6  # the first one is not counted: its memory is new

STRATEGIES: dict[str, Callable[..., Any]] = {
    "fsdp": FSDPStrategy,
    "pipedream": partial(PipelineStrategy, schedule="pipedream", num_microbatches=1),
}


class Wide(L.LightningModule):
    """Has many weights for what it computes."""

    def __init__(self) -> None:
        super().__init__()
        layers = (layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Saves(L.Callback):
    """Saves, and notes how long training waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stalls: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        if rest[-1] % EVERY:
            return
        trainer.strategy.finish_save()
        trainer.strategy.barrier()  # a pipeline's stages come at different times
        began = time.perf_counter()
        trainer.save_checkpoint(self.path)
        self.stalls.append(time.perf_counter() - began)


def on_rank(name: str, is_async: bool) -> tuple[float, float]:
    """Gives the milliseconds of the first stall, and the median of the later ones."""
    quieten()
    rows = BATCH * EVERY * SAVES
    data = TensorDataset(torch.randn(rows, WIDTH), torch.zeros(rows, dtype=torch.long))
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        saves = Saves(Path(folder, "saved.ckpt"))
        trainer = make_trainer(
            devices=2,
            strategy=STRATEGIES[name](async_save=is_async),
            callbacks=[saves],
            barebones=False,
            use_distributed_sampler=False,
        )
        trainer.fit(Wide(), DataLoader(data, batch_size=BATCH))
        trainer.strategy.barrier()
    return 1e3 * saves.stalls[0], 1e3 * statistics.median(saves.stalls[1:])


def compare(pool: WorkerPool, turns: int, name: str) -> list[str]:
    """Gives a row of the table."""
    found: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
    for _ in track(range(turns), name, transient=True):
        for is_async, results in found.items():
            answers = pool.run(2, on_rank, name, is_async, timeout=300)
            results.append(tuple(max(column) for column in zip(*answers, strict=True)))
    row = [name]
    for column in range(2):
        now, later = ([result[column] for result in found[is_async]] for is_async in (False, True))
        ratio = statistics.median(a / b for a, b in zip(now, later, strict=True))
        row.append(f"{statistics.median(now):.0f} / {statistics.median(later):.0f}")
        row.append(f"{ratio:.1f}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    pool = WorkerPool()
    table = Table(title="milliseconds of a stall, median; async_save=False / True")
    for title in ("", "first save", "ratio", "later saves", "ratio"):
        table.add_column(title)
    for name in STRATEGIES:
        table.add_row(*compare(pool, turns, name))
    Console(width=100).print(table)
    pool.close()


if __name__ == "__main__":
    main()
