from __future__ import annotations

from multiprocessing import forkserver

import pytest

import tests.helpers.processes.workers  # noqa: F401  (says what the server of forks imports)
from tests.helpers.lesson_runs import LessonRuns
from tests.helpers.networks.chosen import chosen

LESSONS = pytest.StashKey[LessonRuns]()


def pytest_configure() -> None:
    forkserver.ensure_running()  # it imports while the tests are being collected


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    paths = chosen(session, "lessons", "path")
    if paths and not session.config.option.collectonly:
        session.config.stash[LESSONS] = runs = LessonRuns(paths)
        session.config.add_cleanup(runs.close)


@pytest.fixture(scope="session")
def lessons(pytestconfig: pytest.Config) -> LessonRuns:
    """Lessons that have run beside the tests before, or do so now."""
    return pytestconfig.stash[LESSONS]
