"""Pictures and tables for loggers, as far as each can show them.

Metrics go to every logger through ``self.log``. Weights & Biases shows pictures, tables and pages,
TensorBoard pictures and text. Others, such as a CSV file, have the metrics only.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from lightning_dist.engine.common.table import Table
from lightning_dist.engine.schedules.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_SPANS = 5_000


class Media:
    """Shows things in the loggers of a run; for rank 0.

    Args:
        loggers: Of the Trainer.
    """

    def __init__(self, loggers: Iterable[Logger]) -> None:
        self._wandb: list[WandbLogger] = []
        self._boards: list[TensorBoardLogger] = []
        for logger in loggers:
            if isinstance(logger, WandbLogger):
                self._wandb.append(logger)
            elif isinstance(logger, TensorBoardLogger):
                self._boards.append(logger)

    @property
    def shows_pictures(self) -> bool:
        """Whether any of the loggers does."""
        return bool(self._wandb or self._boards)

    def show_figure(self, name: str, figure: Figure, step: int) -> None:
        """Shows a picture.

        Args:
            name: Where.
            figure: Drawn.
            step: Of the training.
        """
        for wandb in self._wandb:
            wandb.log_image(name, [_pixels(figure)])
        for board in self._boards:
            board.experiment.add_figure(name, figure, step, close=False)

    def show_table(self, name: str, table: Table, step: int) -> None:
        """Shows a table.

        Args:
            name: Where.
            table: Its cells are texts.
            step: Of the training.
        """
        headings = [heading or f"column {i}" for i, heading in enumerate(table.headings)]
        for wandb in self._wandb:
            wandb.log_table(name, columns=headings, data=[list(row) for row in table.rows])
        for board in self._boards:
            lines = [headings, ["---"] * len(headings), *table.rows]
            board.experiment.add_text(name, "\n".join(" | ".join(line) for line in lines), step)

    def show_timeline(self, name: str, timeline: Timeline) -> None:
        """Shows a timeline as a table of numbers, a row per span; W&B can sort and plot it.

        Args:
            name: Where.
            timeline: Its newest spans are shown if there are too many.
        """
        headings = ["rank", "kind", "action", "start (ms)", "duration (ms)"]
        spans = sorted(timeline.shifted_to_zero().spans, key=lambda span: span.start_seconds)
        rows = [
            [s.rank, s.kind.value, str(s.action), s.start_seconds * 1e3, s.duration_seconds * 1e3]
            for s in spans[-_MOST_SPANS:]
        ]
        for wandb in self._wandb:
            wandb.log_table(name, columns=headings, data=rows)

    def show_page(self, name: str, path: Path) -> None:
        """Shows an HTML page; TensorBoard has no place for one.

        Args:
            name: Where.
            path: The file.
        """
        if self._wandb:
            from wandb import Html

            for wandb in self._wandb:
                wandb.experiment.log({name: Html(str(path))})


def _pixels(figure: Figure) -> Any:
    import numpy as np

    canvas: Any = figure.canvas
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())
