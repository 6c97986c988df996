"""Large numbers in three digits."""

from __future__ import annotations

import pytest

from lightning_dist.engine.common.table import format_bytes, format_count


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999_499, "999 K"),
        (999_500, "1 M"),
        (19_500_000_000, "19.5 B"),
        (19_500_000_000_000, "19.5 T"),
        (6_700_000_000_000_000, "6.7 P"),
    ],
)
def test_counts_have_three_digits_and_a_unit(number: int, text: str) -> None:
    assert format_count(number) == text


def test_sizes_reach_petabytes() -> None:
    assert format_bytes(1_500_000_000_000_000) == "1.5 PB"
