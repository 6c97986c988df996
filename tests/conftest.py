from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.helpers.forked_runs import WarmPython
from tests.helpers.workers import NAMED_WARNINGS, WorkerPool

# How long an example takes is the machine's business.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
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
