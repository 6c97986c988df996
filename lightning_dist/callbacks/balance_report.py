"""What becomes of a balance on rank 0.

Tables cost nothing and come with each report. A picture takes rank 0 some tenths of a second, in
which the others wait, so there is one, when training is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from lightning.pytorch.loggers import Logger

from lightning_dist.callbacks import console
from lightning_dist.callbacks.media import Media
from lightning_dist.engine.planning.balance import Balance
from lightning_dist.plotting import plot_balance


def tell_balance(
    balance: Balance,
    conclusion: str,
    loggers: Sequence[Logger],
    step: int,
    *,
    print_tables: bool,
) -> None:
    """Prints a balance, and gives loggers its tables.

    Args:
        balance: What was measured.
        conclusion: A line below the tables.
        loggers: Of the Trainer.
        step: Of the training.
        print_tables: Whether to print the tables above the conclusion.
    """
    tables = {"layers": balance.layer_table, "stages": balance.stage_table}
    console.print_tables(tables.values() if print_tables else (), conclusion)
    media = Media(loggers)
    for name, table in tables.items():
        media.show_table(f"balance/{name}", table, step)


def draw_balance(
    balance: Balance, directory: str | None, loggers: Sequence[Logger], step: int
) -> None:
    """Draws a balance, where there is a place for pictures, and matplotlib.

    Args:
        balance: What was measured.
        directory: Where the picture goes; None writes no file.
        loggers: Of the Trainer.
        step: Of the training.
    """
    media = Media(loggers)
    if find_spec("matplotlib") is None or not (directory or media.shows_pictures):
        return
    path = None if directory is None else Path(directory) / "stage_balance.png"
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    media.show_figure("balance/picture", plot_balance(balance, path), step)
