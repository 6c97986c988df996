"""Large numbers in three digits."""

from __future__ import annotations

from collections.abc import Sequence


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
