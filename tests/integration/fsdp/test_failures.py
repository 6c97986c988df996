"""A sharded run in which something goes wrong ends soon, everywhere, and says why."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from lightning_dist.checkpoint import load_full
from tests.helpers.script_runs import STARTUP_SECONDS, script, training_script


def test_a_killed_rank_ends_the_other_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    arguments = ("--trouble", "sigkill", "--stage", "1", "--at", "5", "--root", str(tmp_path))
    with script("--schedule", "fsdp", *arguments) as run:
        start = time.monotonic()
        assert run.wait(STARTUP_SECONDS + 30) != 0
        assert time.monotonic() - start < STARTUP_SECONDS
    assert "process of rank 1 was lost" in run.output
    (path,) = tmp_path.glob("*.ckpt")
    checkpoint = load_full(path)
    assert checkpoint["global_step"] == 3
    assert len(checkpoint["state_dict"]) == len(checkpoint["optimizer_states"][0]["state"]) == 38


def test_sigterm_ends_all_ranks_at_one_batch_boundary(tmp_path: Path) -> None:
    with training_script(tmp_path, "--schedule", "fsdp", "--pause", "0.02") as run:
        time.sleep(0.3)
        os.killpg(run.process.pid, signal.SIGTERM)
        assert run.wait(15) == 0, run.output
    reports = [(tmp_path / f"report.{rank}").read_text().splitlines() for rank in (0, 1)]
    assert len(reports[0]) == len(reports[1])
