"""What a run came to, in one short table at its end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.table import Table
from torch import Tensor
from typing_extensions import override

import lightning_dist
from lightning_dist.chrome_trace import write_chrome_trace
from lightning_dist.pipeline.actions import ActionKind
from lightning_dist.pipeline.timeline import Timeline
from lightning_dist.plotting import plot_timeline
from recipes.baselines import bigram_bits_per_byte, unigram_bits_per_byte
from recipes.text import TextDataModule

_DRAWN_FORWARDS = 24


class RunSummary(L.Callback):
    """Prints validation loss beside its baselines, speed, bubble, stash, and what was written."""

    def __init__(self) -> None:
        self._training_seconds = 0.0
        self._tokens = 0
        self._batch_start = 0.0

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch_start = time.perf_counter()

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: tuple[Tensor, Tensor],
        batch_idx: int,
    ) -> None:
        self._training_seconds += time.perf_counter() - self._batch_start
        self._tokens += batch[0].numel()

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        table = Table(title="Run summary", show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in (
            *self._quality(trainer),
            *self._speed(trainer),
            *_pipeline_rows(trainer),
            *_files(trainer),
        ):
            table.add_row(name, value, end_section=name in ("bigram baseline", "stashed weights"))
        # A table in a pipe should not break its paths at 80 columns.
        console = Console()
        (console if console.is_terminal else Console(width=120)).print(table)

    def _quality(self, trainer: L.Trainer) -> list[tuple[str, str]]:
        loss = trainer.callback_metrics.get("val_bits_per_byte")
        data = trainer.datamodule
        if loss is None or not isinstance(data, TextDataModule):
            return []
        unigram = unigram_bits_per_byte(data.train_text, data.val_text)
        bigram = bigram_bits_per_byte(data.train_text, data.val_text)
        verdict = "beats both baselines" if loss < min(unigram, bigram) else "not beaten"
        return [
            ("validation", f"{loss:.3f} bits per byte ({verdict})"),
            ("unigram baseline", f"{unigram:.3f} bits per byte"),
            ("bigram baseline", f"{bigram:.3f} bits per byte"),
        ]

    def _speed(self, trainer: L.Trainer) -> list[tuple[str, str]]:
        if not self._training_seconds:
            return []
        replicas = trainer.distributed_sampler_kwargs or {"num_replicas": 1}
        rate = self._tokens * replicas["num_replicas"] / self._training_seconds
        return [("throughput", f"{rate:,.0f} tokens per second")]


def _pipeline_rows(trainer: L.Trainer) -> list[tuple[str, str]]:
    strategy = trainer.strategy
    if not isinstance(strategy, lightning_dist.PipelineStrategy):
        return []
    stash = ", ".join(
        f"{size / 2**20:.2f} MiB on stage {stage}"
        for stage, size in enumerate(strategy.peak_stash_bytes)
    )
    return [
        ("bubble fraction", f"{strategy.steady_timeline.bubble_fraction:.3f} (measured)"),
        ("stashed weights", stash),
    ]


def _files(trainer: L.Trainer) -> list[tuple[str, str]]:
    rows = []
    checkpoint = trainer.checkpoint_callback
    if isinstance(checkpoint, ModelCheckpoint) and checkpoint.best_model_path:
        rows.append(("checkpoint", checkpoint.best_model_path))
    logger = trainer.logger
    if not isinstance(logger, CSVLogger):
        return [(name, _short(path)) for name, path in rows]
    directory = Path(logger.log_dir)
    rows.append(("metrics", str(directory / "metrics.csv")))
    strategy = trainer.strategy
    if isinstance(strategy, lightning_dist.PipelineStrategy) and strategy.timeline.spans:
        picture, trace = directory / "timeline.png", directory / "trace.json"
        plot_timeline(newest_part(strategy.steady_timeline), picture, title="Measured")
        write_chrome_trace(strategy.steady_timeline, trace)
        rows += [("timeline", str(picture)), ("trace", str(trace))]
    return [(name, _short(path)) for name, path in rows]


def newest_part(timeline: Timeline) -> Timeline:
    """Cuts out as much as can be read on one picture."""
    forwards = sum(s.action.kind is ActionKind.FORWARD and s.rank == 0 for s in timeline.spans)
    seconds = timeline.makespan_seconds * min(1.0, _DRAWN_FORWARDS / max(1, forwards))
    # Not the very end, where the pipeline runs empty.
    end = timeline.end_seconds - 0.05 * timeline.makespan_seconds
    return timeline.between(end - seconds, end)


def _short(path: str) -> str:
    """Gives a path relative to here where that is shorter."""
    absolute = Path(path).resolve()
    here = Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)
