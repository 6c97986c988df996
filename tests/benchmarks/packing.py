"""Padded, bucketed and packed batches of the same texts: ``python -m tests.benchmarks.packing``.

Not a test. A GPT trains on docstrings, whose lengths differ. The three ways take turns, and each is
compared with the padded batches of its own round. Padding is no token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from lightning_dist import DDPStrategy, PipelineStrategy
from recipes.docstrings import load_docstrings
from recipes.gpt import GPT
from recipes.streaming.buckets import LengthBuckets
from recipes.text import SeededShuffle
from tests.benchmarks.quiet import QUIET_TRAINER, quieten
from tests.helpers.processes.workers import WorkerPool

IGNORED = -100  # as in cross_entropy
LONGEST, TOKENS_PER_BATCH, SEQUENCE_LENGTH = 384, 4096, 128
SKIPPED_BATCHES = 5
STRATEGIES: dict[str, Callable[[], Any]] = {
    "pipedream": lambda: PipelineStrategy(schedule="pipedream", partition=[3, 3]),
    "1f1b, m=4": lambda: PipelineStrategy(num_microbatches=4, partition=[3, 3]),
    "DDPStrategy": DDPStrategy,
}


class Texts(Dataset[Tensor]):
    """Texts of several lengths; an index may be that of a batch."""

    def __init__(self, texts: Sequence[Tensor]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int | list[int]) -> Any:
        return [self.texts[i] for i in index] if isinstance(index, list) else self.texts[index]


def load_texts() -> list[Tensor]:
    """Returns each docstring's bytes, with an end."""
    texts = [f"{docstring.text}\n".encode()[: LONGEST + 1] for docstring in load_docstrings()]
    return [torch.tensor(list(text)) for text in texts]


def pad(texts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Pads texts to the longest."""
    inputs = pad_sequence([text[:-1] for text in texts], batch_first=True)
    targets = pad_sequence([text[1:] for text in texts], batch_first=True, padding_value=IGNORED)
    return inputs, targets


def padded(texts: Sequence[Tensor], replica: dict[str, int]) -> DataLoader[Any]:
    """Loads as many texts in each batch, of any lengths."""
    data = Texts(texts)
    tens = [texts[i : i + 10] for i in range(0, len(texts), 10)]
    longest = statistics.fmean(max(map(len, ten)) for ten in tens)
    size = round(TOKENS_PER_BATCH / longest)
    sampler = SeededShuffle(data, 0, len(texts), **replica)
    return DataLoader(data, batch_size=size, sampler=sampler, collate_fn=pad, drop_last=True)


def bucketed(texts: Sequence[Tensor], replica: dict[str, int]) -> DataLoader[Any]:
    """Loads texts of like length, with as many tokens in each batch."""
    lengths = torch.tensor([len(text) - 1 for text in texts])
    sampler = LengthBuckets(lengths, TOKENS_PER_BATCH, 0, **replica)
    return DataLoader(Texts(texts), batch_size=None, sampler=sampler, collate_fn=pad)


def packed(texts: Sequence[Tensor], replica: dict[str, int]) -> DataLoader[Any]:
    """Loads rows of texts that follow each other without padding, as shards have them."""
    whole = torch.cat(list(texts))
    data = Texts(list(whole.unfold(0, SEQUENCE_LENGTH + 1, SEQUENCE_LENGTH)))
    sampler = SeededShuffle(data, 0, len(data), **replica)
    size = TOKENS_PER_BATCH // SEQUENCE_LENGTH
    return DataLoader(data, batch_size=size, sampler=sampler, collate_fn=pad, drop_last=True)


WAYS = {"padded": padded, "buckets": bucketed, "packed": packed}


@dataclass(frozen=True)
class Trained:
    """What a run has shown.

    Attributes:
        tokens_per_second: Of all replicas, padding left out.
        padding: The padding's share of all positions.
        spread: Standard deviation of the batches' positions over their mean.
        bubble: Of a pipeline.
    """

    tokens_per_second: float
    padding: float
    spread: float
    bubble: float | None


class Counting(L.Callback):
    """Counts tokens and positions, and the time they take."""

    def __init__(self) -> None:
        self.tokens = 0
        self.positions: list[int] = []
        self.began = self.seconds = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == SKIPPED_BATCHES:
            self.began = time.perf_counter()
        if batch_idx >= SKIPPED_BATCHES:
            self.tokens += int((batch[1] != IGNORED).sum())
            self.positions.append(batch[1].numel())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds = time.perf_counter() - self.began


def train(strategy_name: str, way: str) -> Trained:
    """Trains on all texts once."""
    quieten()
    strategy, counting = STRATEGIES[strategy_name](), Counting()
    trainer = L.Trainer(
        **QUIET_TRAINER,
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        num_sanity_val_steps=0,
        callbacks=[counting],
    )
    texts = load_texts()

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> DataLoader[Any]:
            return WAYS[way](texts, trainer.distributed_sampler_kwargs or {})

    torch.manual_seed(0)
    trainer.fit(GPT(), datamodule=Data())
    positions, replicas = counting.positions, trainer.distributed_sampler_kwargs or {}
    is_pipeline = isinstance(strategy, PipelineStrategy)
    return Trained(
        counting.tokens * replicas.get("num_replicas", 1) / counting.seconds,
        1 - counting.tokens / sum(positions),
        statistics.pstdev(positions) / statistics.fmean(positions),
        strategy.steady_timeline.bubble_fraction if is_pipeline else None,
    )


def main() -> None:
    """Prints a table for each strategy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the three ways")
    parser.add_argument("--only", default="", help="part of a strategy's name")
    options = parser.parse_args()
    table = Table(title=f"Medians of {options.rounds} rounds")
    headings = ("strategy", "batches", "padding", "size's spread", "bubble", "tokens per second")
    for heading in (*headings, "beside padded, by round"):
        table.add_column(heading)
    pool = WorkerPool()
    for name in (name for name in STRATEGIES if options.only in name):
        runs: dict[str, list[Trained]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way in WAYS:
                runs[way].append(pool.run(2, train, name, way)[0])
        for way, own in runs.items():
            bubbles = [run.bubble for run in own if run.bubble is not None]
            pairs = zip(own, runs["padded"], strict=True)
            ratios = [run.tokens_per_second / base.tokens_per_second for run, base in pairs]
            rate = statistics.median(run.tokens_per_second for run in own)
            table.add_row(
                name,
                way,
                f"{own[0].padding:.0%}",
                f"{own[0].spread:.0%}",
                f"{statistics.median(bubbles):.3f}" if bubbles else "",
                f"{rate:,.0f}",
                ", ".join(f"{ratio:.2f}" for ratio in ratios),
            )
    pool.close()
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
