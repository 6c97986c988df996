"""A process with an unfinished collective can leave, though its peer never answers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.helpers.processes.forked_runs import LEAVE, STARTUP_SECONDS, WarmPython


@pytest.mark.some("keeps*")
@pytest.mark.parametrize(("keeps", "leaves"), [("keeps", True), ("does not", False)])
def test_a_process_leaves_an_unfinished_collective_behind(
    warm_python: WarmPython, tmp_path: Path, keeps: str, leaves: bool
) -> None:
    with warm_python.ranks(tmp_path, keeps, script=LEAVE) as run:
        deadline = time.monotonic() + STARTUP_SECONDS
        while run.output.count("ready") < 2:
            assert time.monotonic() < deadline, run.output
            time.sleep(0.02)
        deadline = time.monotonic() + (20 if leaves else 5)
        while run.exit_codes()[1] is None and time.monotonic() < deadline:
            time.sleep(0.02)
        # Without: what the package has to work around; when torch mends it, so can we.
        assert run.exit_codes() == [None, 3 if leaves else None], run.output
