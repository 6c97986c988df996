"""Tables, as text or for whoever draws them otherwise.

Large numbers in three digits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


def format_count(number: int) -> str:
    """Writes a number of things.

    Args:
        number: At least 0.
    """
    return _three_digits(number, ("", "K", "M", "B"))


def scale_of_bytes(num_bytes: float) -> tuple[float, str]:
    """Chooses a unit for an axis, in powers of 1000.

    Args:
        num_bytes: The most that is shown.

    Returns:
        Bytes in the unit, and its name.
    """
    scale, names = 1.0, ["B", "kB", "MB", "GB", "TB"]
    while num_bytes >= 1000 * scale and len(names) > 1:
        scale, names = scale * 1000, names[1:]
    return scale, names[0]


def format_bytes(num_bytes: int) -> str:
    """Writes a size, in powers of 1000.

    Args:
        num_bytes: At least 0.
    """
    return _three_digits(num_bytes, ("B", "kB", "MB", "GB", "TB"))


def _three_digits(number: float, scales: Sequence[str]) -> str:
    scale, *larger = scales
    if number < 999.5 or not larger:
        return f"{number:.3g} {scale}".rstrip()
    return _three_digits(number / 1000, larger)


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
