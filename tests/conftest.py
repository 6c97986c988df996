from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.forked_runs import WarmPython
from tests.helpers.workers import NAMED_WARNINGS, WorkerPool


def pytest_configure(config: pytest.Config) -> None:
    for category, message in NAMED_WARNINGS:
        config.addinivalue_line("filterwarnings", f"ignore:{message}:{category.__name__}")


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """Processes for distributed cases, shared by the whole session."""
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """Forks ranks for runs in which something goes wrong."""
    python = WarmPython()
    yield python
    python.close()
