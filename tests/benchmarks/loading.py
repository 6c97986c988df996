"""What reading costs where ranks share a data replica: ``python -m tests.benchmarks.loading``.

Not a test. A pipeline trains on a dataset whose batches are expensive: each sleeps for 50 ms, as if
it waited for a disk, and decompresses images. ``read="each"``, where every rank reads every batch,
and ``read="first"`` take turns in the same processes; medians are over the turns. A second table
has images of 3 x 224 x 224 that cost nothing to read, so that only their way to the ranks counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
import zlib
from typing import Any

import lightning as L
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_dist import PipelineStrategy
from lightning_dist.strategies.base.distributed import Read
from tests.benchmarks.quiet import quieten
from tests.helpers.networks.models import make_trainer
from tests.helpers.processes.workers import WorkerPool

BATCH = 32
SLEEP_SECONDS = 0.05
NUM_BATCHES = 24
WARMUP_BATCHES = 6


class Compressed(Dataset[Any]):
    """Whole batches of images, to be waited for and decompressed; counts the seconds of both."""

    def __init__(self, side: int, sleep_seconds: float) -> None:
        generator = np.random.default_rng(0)
        images = generator.integers(0, 64, (BATCH, 3, side, side), dtype=np.uint8)
        self.side = side
        self.sleep_seconds = sleep_seconds
        self.data = zlib.compress(images.tobytes(), 1)
        self.labels = torch.from_numpy(generator.integers(0, 10, BATCH))
        self.seconds = 0.0

    def __len__(self) -> int:
        return NUM_BATCHES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        began = time.perf_counter()
        time.sleep(self.sleep_seconds)
        pixels = np.frombuffer(zlib.decompress(self.data), np.uint8)
        images = torch.from_numpy(pixels.astype(np.float32)).view(BATCH, 3, self.side, self.side)
        self.seconds += time.perf_counter() - began
        return images, self.labels


class Ready(Compressed):
    """Whole batches that lie in memory."""

    def __init__(self, side: int, sleep_seconds: float) -> None:
        self.images = torch.randn(BATCH, 3, side, side)
        self.labels = torch.randint(0, 10, (BATCH,))
        self.seconds = 0.0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images, self.labels


class Small(L.LightningModule):
    """Computes little, and learns nothing."""

    def __init__(self) -> None:
        super().__init__()
        narrow = (layer for _ in range(3) for layer in (nn.Linear(48, 48), nn.Tanh()))
        self.model = nn.Sequential(
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), *narrow, nn.Linear(48, 10)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Clock(L.Callback):
    """Notes when batches have ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())


def on_rank(
    stages: int, schedule: str, read: Read, dataset: type[Compressed], side: int
) -> tuple[float, float, float]:
    """Gives milliseconds of a batch, those spent in the dataset, and those of this rank's CPU."""
    quieten()
    data, clock = dataset(side, SLEEP_SECONDS), Clock()
    strategy = PipelineStrategy(num_stages=stages, schedule=schedule, num_microbatches=1, read=read)
    trainer = make_trainer(devices=stages, strategy=strategy, callbacks=[clock], barebones=False)
    torch.manual_seed(0)
    began = time.process_time()
    trainer.fit(Small(), DataLoader(data, batch_size=None))
    cpu = 1e3 * (time.process_time() - began) / NUM_BATCHES
    counted = clock.ends[WARMUP_BATCHES:]
    milliseconds = 1e3 * (counted[-1] - counted[0]) / (len(counted) - 1)
    return milliseconds, 1e3 * data.seconds / NUM_BATCHES, cpu


def compare(
    pool: WorkerPool, turns: int, stages: int, schedule: str, dataset: type[Compressed], side: int
) -> list[str]:
    """Gives a row of a table."""
    found: dict[Read, list[tuple[float, float, float]]] = {"each": [], "first": []}
    for _ in track(range(turns), f"{stages} stages, {schedule}", transient=True):
        for read, results in found.items():
            answers = pool.run(stages, on_rank, stages, schedule, read, dataset, side)
            wall = max(answer[0] for answer in answers)
            results.append((wall, sum(a[1] for a in answers), sum(a[2] for a in answers)))
    ratio = statistics.median(
        first[0] / each[0] for each, first in zip(found["each"], found["first"], strict=True)
    )
    medians = {
        read: [statistics.median(column) for column in zip(*results, strict=True)]
        for read, results in found.items()
    }
    shown = [
        f"{medians['each'][column]:.1f} / {medians['first'][column]:.1f}" for column in range(3)
    ]
    return [f"{stages}, {schedule}", *shown, f"{ratio:.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    pool = WorkerPool()
    kinds = [("50 ms of sleep and 1.5 MB decompressed", Compressed, 128)]
    kinds.append(("images of 3 x 224 x 224 from memory", Ready, 224))
    for title, dataset, side in kinds:
        table = Table(title=f"{title}; each / first")
        for name in ("stages", "ms per batch", "reading, all ranks", "CPU, all ranks", "ratio"):
            table.add_column(name)
        for stages in (2, 4):
            for schedule in ("1f1b", "pipedream"):
                table.add_row(*compare(pool, turns, stages, schedule, dataset, side))
        Console(width=100).print(table)
    pool.close()


if __name__ == "__main__":
    main()
