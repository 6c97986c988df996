"""A data-parallel run in which something goes wrong ends soon, everywhere, and says why."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

from tests.helpers.script_runs import STARTUP_SECONDS, script, training_script


def test_a_users_exception_ends_all_ranks_and_is_shown_first() -> None:
    with script("--schedule", "ddp", "--trouble", "raise", "--stage", "1") as run:
        assert run.wait(STARTUP_SECONDS) == 1
    errors = re.findall(
        r"^(?:\[rank\d\]: )?(\w*(?:\.\w+)*(?:Error|Exception)): .*", run.output, re.M
    )
    assert errors[0] == "KeyError", errors
    assert "the user's own mistake" in run.output


def test_a_killed_rank_ends_the_other_and_is_named() -> None:
    with script("--schedule", "ddp", "--trouble", "sigkill", "--stage", "1") as run:
        start = time.monotonic()
        assert run.wait(STARTUP_SECONDS + 30) != 0
        assert time.monotonic() - start < STARTUP_SECONDS
    assert "process of rank 1 was lost" in run.output


def test_sigterm_ends_all_ranks_at_one_batch_boundary(tmp_path: Path) -> None:
    with training_script(tmp_path, "--schedule", "ddp", "--pause", "0.02") as run:
        time.sleep(0.3)
        os.killpg(run.process.pid, signal.SIGTERM)
        assert run.wait(15) == 0, run.output
    reports = [(tmp_path / f"report.{rank}").read_text().splitlines() for rank in (0, 1)]
    assert len(reports[0]) == len(reports[1])
