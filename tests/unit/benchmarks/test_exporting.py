"""What an export holds in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.exporting import export_each

TOTAL_BYTES = 480_000_000


@pytest.mark.long
def test_an_export_does_not_hold_the_model(tmp_path: Path) -> None:
    costs = export_each(tmp_path, TOTAL_BYTES)
    base = costs.pop("imports alone").anonymous
    assert len(costs) == 4
    for name, cost in costs.items():
        assert cost.anonymous - base < TOTAL_BYTES / 4, name  # of 16 tensors two, and a margin
