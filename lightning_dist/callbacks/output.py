"""Output of callbacks: tables on the console, files, and pictures and tables in loggers.

Metrics go to every logger. Weights & Biases shows pictures, tables and pages,
MLflow pictures, pages and text, TensorBoard pictures and text. Others, such as a CSV file, have the
metrics only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_dist.engine.common.table import Table
from lightning_dist.engine.profiling.report import ProfileReport
from lightning_dist.engine.profiling.summary import memory_table, summary_table, time_table
from lightning_dist.engine.schedules.timeline import Timeline
from lightning_dist.plotting import plot_profile, write_page
from lightning_dist.plotting.chrome_trace import write_chrome_trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDEST = 1000
_LONGEST_TEXT = 72  # characters of a cell that is no number; longer ones are folded
_MOST_SPANS = 5_000
_NAME = "step_profile"


@rank_zero_only
def print_tables(tables: Iterable[Table], *conclusions: str) -> None:
    """Prints tables on rank 0, one below the other, and lines below them."""
    if find_spec("rich") is None:
        for table in tables:
            print(f"{table.title}\n{table}\n")
        print(*conclusions, sep="\n")
        return
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console()
    for table in tables:
        drawn = RichTable(title=table.title, title_justify="left", show_header=any(table.headings))
        for column, heading in enumerate(table.headings):
            if column in table.right:
                drawn.add_column(heading, justify="right", no_wrap=True)
            else:
                drawn.add_column(heading, max_width=_LONGEST_TEXT, overflow="fold")
        for row in table.rows:
            drawn.add_row(*row)
        # A log file has no width; a cut-off number is worse than a long line.
        wide = console.options.update(width=_WIDEST)
        console.width = max(console.width, console.measure(drawn, options=wide).maximum)
        console.print(drawn)
    for line in conclusions:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def log_at_once(
    trainer: pl.Trainer, module: pl.LightningModule, metrics: Mapping[str, float]
) -> None:
    """Shows metrics to callbacks, as ``log_dict`` does, and to all loggers, once.

    Lightning would give loggers what is logged only in each ``log_every_n_steps``-th batch, and
    leave out or repeat metrics that come once in a while.
    """
    module.log_dict(metrics, batch_size=1, logger=False)
    for logger in trainer.loggers:
        logger.log_metrics({**metrics, "epoch": trainer.current_epoch}, trainer.global_step)
        logger.save()


class Media:
    """Shows pictures, tables and pages in the loggers of a run, on rank 0."""

    def __init__(self, loggers: Iterable[Logger]) -> None:
        self._loggers = tuple(loggers)

    @property
    def shows_pictures(self) -> bool:
        """Whether any of the loggers shows pictures."""
        kinds = (WandbLogger, TensorBoardLogger, MLFlowLogger)
        return any(isinstance(logger, kinds) for logger in self._loggers)

    def show_figure(self, name: str, figure: Figure, step: int) -> None:
        """Shows a picture."""
        for logger in self._loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image(name, [_pixels(figure)])
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure(name, figure, step, close=False)
            elif isinstance(logger, MLFlowLogger):
                logger.experiment.log_figure(logger.run_id, figure, f"{name}/{step}.png")

    def show_table(self, name: str, table: Table, step: int) -> None:
        """Shows a table, whose cells are texts."""
        headings = [heading or f"column {i}" for i, heading in enumerate(table.headings)]
        lines = [headings, ["---"] * len(headings), *table.rows]
        text = "\n".join(" | ".join(line) for line in lines)
        for logger in self._loggers:
            if isinstance(logger, WandbLogger):
                logger.log_table(name, columns=headings, data=[list(row) for row in table.rows])
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text(name, text, step)
            elif isinstance(logger, MLFlowLogger):
                logger.experiment.log_text(logger.run_id, text, f"{name}/{step}.md")

    def show_timeline(self, name: str, timeline: Timeline) -> None:
        """Shows the newest spans as a table of numbers, which W&B can sort and plot."""
        headings = ["rank", "kind", "action", "start (ms)", "duration (ms)"]
        spans = sorted(timeline.shifted_to_zero().spans, key=lambda span: span.start_seconds)
        rows = [
            [s.rank, s.kind.value, str(s.action), s.start_seconds * 1e3, s.duration_seconds * 1e3]
            for s in spans[-_MOST_SPANS:]
        ]
        for logger in self._loggers:
            if isinstance(logger, WandbLogger):
                logger.log_table(name, columns=headings, data=rows)

    def show_page(self, name: str, path: Path) -> None:
        """Shows an HTML page; TensorBoard has no place for one."""
        for logger in self._loggers:
            if isinstance(logger, WandbLogger):
                from wandb import Html

                logger.experiment.log({name: Html(str(path))})
            elif isinstance(logger, MLFlowLogger):
                logger.experiment.log_artifact(logger.run_id, str(path), name)


def _pixels(figure: Figure) -> Any:
    import numpy as np

    canvas: Any = figure.canvas
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def publish(report: ProfileReport, directory: Path, loggers: Iterable[Logger], step: int) -> None:
    """Prints a profile, writes its files to a directory, and shows it in loggers at a step."""
    directory.mkdir(parents=True, exist_ok=True)
    tables = {
        "summary": summary_table(report),
        "time": time_table(report),
        "memory": memory_table(report),
    }
    media = Media(loggers)
    for name, table in tables.items():
        media.show_table(f"profile/{name}", table, step)
    media.show_timeline("profile/spans", report.timeline)
    written = [directory / f"{_NAME}.json"]
    phases = (phase for record in report.records for phase in record.phases)
    write_chrome_trace(report.timeline, written[0], phases)
    if find_spec("matplotlib") is not None:
        written.append(directory / f"{_NAME}.png")
        media.show_figure("profile/timeline", plot_profile(report, written[-1]), step)
    if find_spec("plotly") is not None:
        written.append(directory / f"{_NAME}.html")
        write_page(report, written[-1])
        media.show_page("profile/page", written[-1])
    conclusions = [f"Profile: {', '.join(map(str, written))}"]
    missing = [name for name in ("matplotlib", "plotly") if find_spec(name) is None]
    if missing:
        conclusions.append(
            f"Without {' and '.join(missing)} some pictures are missing: pip install"
            " 'lightning-dist[plots]'."
        )
    print_tables(tables.values(), *conclusions)
