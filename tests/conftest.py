from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.workers import WorkerPool


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """Processes for distributed cases, shared by the whole session."""
    pool = WorkerPool()
    yield pool
    pool.close()
