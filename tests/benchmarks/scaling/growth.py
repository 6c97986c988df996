"""How a number grows with the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from types import MappingProxyType

ALIKE = 0.03
"""Relative difference up to which numbers count as equal."""

_SHAPES: Mapping[str, Callable[[int], float]] = MappingProxyType(
    {
        "bounded": lambda n: -1.0 / n,  # a ring's share of (n - 1) / n
        "logarithmic": math.log2,
        "linear": float,
        "quadratic": lambda n: float(n * n),
    }
)


def growth(sizes: Sequence[int], values: Sequence[float], noise: float = 0.0) -> str:
    """Names the curve ``a + b * f(n)`` that is nearest to some values, by least squares.

    Args:
        sizes: Numbers of ranks, three or more.
        values: A value for each.
        noise: By what part of their mean values differ without a reason. Of the curves that are as
            near as that, the slowest counts.

    Returns:
        ``"constant"``, ``"falling"``, ``"bounded"``, ``"logarithmic"``, ``"linear"`` or
        ``"quadratic"``; of a linear one with what each rank adds.
    """
    mean = fmean(values)
    if all(abs(value - mean) <= max(ALIKE, noise) * abs(mean) for value in values):
        return "constant"
    fits = {name: _fit([f(n) for n in sizes], values) for name, f in _SHAPES.items()}
    best = min(distance for _, distance in fits.values())
    limit = max(best, noise * abs(mean))
    name = next(name for name, (_, distance) in fits.items() if distance <= limit)
    slope = fits[name][0]
    if slope < 0:
        return "falling"
    return f"linear, {slope:.3g} per rank" if name == "linear" else name


def _fit(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Returns a line's slope, and how far values are from it, the root of the mean square."""
    x_mean, y_mean = fmean(xs), fmean(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread
    left = (y - y_mean - slope * (x - x_mean) for x, y in zip(xs, ys, strict=True))
    return slope, math.sqrt(fmean(value**2 for value in left))
