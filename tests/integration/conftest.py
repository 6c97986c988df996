from __future__ import annotations

from multiprocessing import forkserver

import tests.helpers.workers  # noqa: F401  (says what the server of forks imports)


def pytest_configure() -> None:
    forkserver.ensure_running()  # it imports while the tests are being collected
