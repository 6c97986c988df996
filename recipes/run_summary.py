"""The results of a run, in one short table at its end."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.table import Table
from typing_extensions import override

import lightning_dist
from lightning_dist.engine.schedules.actions import ActionKind
from lightning_dist.engine.schedules.timeline import Timeline
from lightning_dist.plotting import plot_timeline
from lightning_dist.plotting.chrome_trace import write_chrome_trace
from recipes.baselines import bigram_bits_per_byte, unigram_bits_per_byte
from recipes.text import TextDataModule
from recipes.throughput import Throughput

_DRAWN_FORWARDS = 24
_PIPELINED = (lightning_dist.PipelineStrategy, lightning_dist.MeshStrategy)


class TimedTraining(L.Callback):
    """Keeps a row on how long training took, for the table after a test.

    Attributes:
        places: Places of the seconds behind the point.
    """

    places = 1

    def __init__(self) -> None:
        self._start, self._first_step = 0.0, 0
        self._training: list[tuple[str, str]] = []

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start, self._first_step = time.perf_counter(), trainer.global_step

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        seconds = f"{time.perf_counter() - self._start:.{self.places}f}"
        num_steps = trainer.global_step - self._first_step
        self._training = [("training", f"{num_steps} steps in {seconds} seconds")]


class RunSummary(Throughput):
    """Prints validation loss beside its baselines, speed, bubble, stash, and written files."""

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        print_table(
            (
                *self._quality(trainer),
                *self._speed(trainer),
                *_pipeline_rows(trainer),
                *_files(trainer),
            ),
            section_ends=("bigram baseline", "stashed weights"),
        )

    def _quality(self, trainer: L.Trainer) -> list[tuple[str, str]]:
        loss = trainer.callback_metrics.get("val_bits_per_byte")
        data = trainer.datamodule
        if loss is None:
            return []
        if not isinstance(data, TextDataModule):
            return [("validation", f"{loss:.3f} bits per byte")]
        unigram = unigram_bits_per_byte(data.train_text, data.val_text)
        bigram = bigram_bits_per_byte(data.train_text, data.val_text)
        beats = {
            (True, True): "beats both baselines",
            (True, False): "beats the unigram only",
            (False, True): "beats the bigram only",
            (False, False): "beats no baseline",
        }[bool(loss < unigram), bool(loss < bigram)]
        return [
            ("validation", f"{loss:.3f} bits per byte ({beats})"),
            ("unigram baseline", f"{unigram:.3f} bits per byte"),
            ("bigram baseline", f"{bigram:.3f} bits per byte"),
        ]

    def _speed(self, trainer: L.Trainer) -> list[tuple[str, str]]:
        rate = self.tokens_per_second(trainer)
        return [] if rate is None else [("throughput", f"{rate:,.0f} tokens per second")]


def print_table(rows: Iterable[tuple[str, str]], section_ends: Iterable[str] = ()) -> None:
    """Prints the table of a run's results.

    Args:
        rows: Names and values.
        section_ends: Names of the rows that have a line below them.
    """
    table = Table(title="Run summary", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    ends = set(section_ends)
    for name, value in rows:
        table.add_row(name, value, end_section=name in ends)
    # A table in a pipe should not break its paths at 80 columns.
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(table)


def _pipeline_rows(trainer: L.Trainer) -> list[tuple[str, str]]:
    strategy = trainer.strategy
    if not isinstance(strategy, _PIPELINED) or not strategy.timeline.spans:
        return []
    bubble = strategy.steady_timeline.bubble_fraction
    measured = ("bubble fraction", f"{bubble:.3f} (measured between drains)")
    if isinstance(strategy, lightning_dist.MeshStrategy):
        return [measured]
    stash = ", ".join(
        f"{size / 2**20:.2f} MiB on stage {stage}"
        for stage, size in enumerate(strategy.peak_stash_bytes)
    )
    return [measured, ("stashed weights", stash)]


def _files(trainer: L.Trainer) -> list[tuple[str, str]]:
    rows = written_files(trainer)
    strategy = trainer.strategy
    if not isinstance(trainer.logger, CSVLogger):
        return rows
    if isinstance(strategy, _PIPELINED) and strategy.timeline.spans:
        directory = Path(trainer.logger.log_dir)
        timeline, trace = strategy.steady_timeline, directory / "trace.json"
        rows.append(("timeline", _draw(timeline, directory / "timeline.png")))
        write_chrome_trace(timeline, trace)
        rows.append(("trace", short_path(trace)))
    return rows


def written_files(trainer: L.Trainer) -> list[tuple[str, str]]:
    """Returns the files that any run writes: the best checkpoint and the metrics.

    Args:
        trainer: The trainer, after its run.
    """
    rows = []
    checkpoint = trainer.checkpoint_callback
    if isinstance(checkpoint, ModelCheckpoint) and checkpoint.best_model_path:
        rows.append(("checkpoint", short_path(checkpoint.best_model_path)))
    if isinstance(trainer.logger, CSVLogger):
        rows.append(("metrics", short_path(Path(trainer.logger.log_dir) / "metrics.csv")))
    return rows


def _draw(timeline: Timeline, picture: Path) -> str:
    try:
        plot_timeline(newest_part(timeline), picture, title="Measured")
    except ImportError as error:  # matplotlib is optional: a finished run keeps its table
        return f"not drawn. {error}"
    return short_path(picture)


def newest_part(timeline: Timeline) -> Timeline:
    """Returns the newest part of a timeline that can be read on one picture."""
    forwards = sum(s.action.kind is ActionKind.FORWARD and s.rank == 0 for s in timeline.spans)
    seconds = timeline.makespan_seconds * min(1.0, _DRAWN_FORWARDS / max(1, forwards))
    # Not the very end, where the pipeline runs empty.
    end = timeline.end_seconds - 0.05 * timeline.makespan_seconds
    return timeline.between(end - seconds, end)


def short_path(path: str | Path) -> str:
    """Returns a path relative to the current directory, if the path is inside of it.

    Args:
        path: Any path.
    """
    absolute = Path(path).resolve()
    here = Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)
