"""Ordinary modules under each strategy at the first try: equal to one device, or told what to do.

``docs/first_hour.md`` has a table of what becomes of each; these tests run each cell of it, and
``python -m tests.integration.first_hour.table`` writes it anew.
"""

from __future__ import annotations

import pytest

from tests.helpers.workers import WorkerPool
from tests.integration.first_hour.common import STRATEGIES
from tests.integration.first_hour.modules import MODULES
from tests.integration.first_hour.table import outcome, read_table


@pytest.fixture(scope="module")
def table() -> dict[tuple[str, str], str]:
    return read_table()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("module", MODULES)
def test_a_newcomers_module(
    workers: WorkerPool, table: dict[tuple[str, str], str], module: str, strategy: str
) -> None:
    assert outcome(workers, module, strategy) == table[module, strategy]


def test_stages_train_nearly_all_of_them(table: dict[tuple[str, str], str]) -> None:
    cells = [table[module, "PipelineStrategy()"] for module in MODULES]
    assert sum(cell == "equal" for cell in cells) >= 13
