from __future__ import annotations

from multiprocessing import forkserver

import pytest

import tests.helpers.workers  # noqa: F401  (says what the server of forks imports)
from tests.helpers.chosen import chosen
from tests.helpers.idle_runs import IdleRuns

IDLE_RUNS = pytest.StashKey[IdleRuns]()


def pytest_configure() -> None:
    forkserver.ensure_running()  # it imports while the tests are being collected


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    jobs = chosen(session, "idle_runs", "job")
    if jobs and not session.config.option.collectonly:
        session.config.stash[IDLE_RUNS] = runs = IdleRuns(jobs)
        session.config.add_cleanup(runs.close)


@pytest.fixture(scope="session")
def idle_runs(pytestconfig: pytest.Config) -> IdleRuns:
    """Jobs that have run beside the tests before, or do so now."""
    return pytestconfig.stash[IDLE_RUNS]
