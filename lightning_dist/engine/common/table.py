"""Tables as cells or as text, and large numbers in three digits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


def format_count(number: int) -> str:
    """Returns a count of at least 0 in three digits and a unit."""
    return _three_digits(number, ("", "K", "M", "B", "T", "P"))


def scale_of_bytes(num_bytes: float) -> tuple[float, str]:
    """Returns bytes per unit and the unit's name, for an axis up to a number of bytes."""
    scale, names = 1.0, ["B", "kB", "MB", "GB", "TB"]
    while num_bytes >= 1000 * scale and len(names) > 1:
        scale, names = scale * 1000, names[1:]
    return scale, names[0]


def format_bytes(num_bytes: int) -> str:
    """Returns a size of at least 0 bytes in three digits and a unit, in powers of 1000."""
    return _three_digits(num_bytes, ("B", "kB", "MB", "GB", "TB", "PB"))


def _three_digits(number: float, scales: Sequence[str]) -> str:
    scale, *larger = scales
    if number < 999.5 or not larger:
        return f"{number:.3g} {scale}".rstrip()
    return _three_digits(number / 1000, larger)


@dataclass(frozen=True, slots=True)
class Table:
    """A table of cells with a heading for each column; ``str`` aligns the columns."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()  # the columns to align to the right, as numbers should be

    def __str__(self) -> str:
        """Draws the table without its title."""
        return draw_table([self.headings, *self.rows], self.right)


def draw_table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Returns a line for each row, with aligned columns; see :class:`Table`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def padded(column: int, cell: str) -> str:
        width = widths[column]
        return cell.rjust(width) if column in right else cell.ljust(width)

    return "\n".join("  ".join(padded(*pair) for pair in enumerate(row)).rstrip() for row in rows)
