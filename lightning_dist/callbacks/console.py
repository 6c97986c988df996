"""Print tables: with rich where it is installed, else as text."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_dist.engine.common.table import Table

_WIDEST = 1000


@rank_zero_only
def print_tables(tables: Iterable[Table], *conclusions: str) -> None:
    """Prints on rank 0.

    Args:
        tables: One below the other.
        conclusions: Lines below them.
    """
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
            justify: Literal["left", "right"] = "right" if column in table.right else "left"
            drawn.add_column(heading, justify=justify, no_wrap=True)
        for row in table.rows:
            drawn.add_row(*row)
        # A log file has no width; a cut-off number is worse than a long line.
        wide = console.options.update(width=_WIDEST)
        console.width = max(console.width, console.measure(drawn, options=wide).maximum)
        console.print(drawn)
    for line in conclusions:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
