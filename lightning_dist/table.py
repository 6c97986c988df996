"""Draw a plain-text table."""

from __future__ import annotations

from collections.abc import Collection, Sequence


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
