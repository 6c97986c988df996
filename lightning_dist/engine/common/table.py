"""Tables, as text or for whoever draws them otherwise."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    """Cells with a heading for each column; as text, aligned.

    Attributes:
        title: Of the whole.
        headings: Of the columns.
        rows: Cells, as many in each row.
        right: The columns that are aligned to the right, which numbers should be.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()

    def __str__(self) -> str:
        """Draws it without its title."""
        return draw_table([self.headings, *self.rows], self.right)


def draw_table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Aligns the columns of a table.

    Args:
        rows: Cells, as many in each row.
        right: The columns that are aligned to the right, which numbers should be.

    Returns:
        A line for each row, with two spaces between columns and none at the end.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def padded(column: int, cell: str) -> str:
        width = widths[column]
        return cell.rjust(width) if column in right else cell.ljust(width)

    return "\n".join("  ".join(padded(*pair) for pair in enumerate(row)).rstrip() for row in rows)
