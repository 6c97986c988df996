"""A sharded run in which something goes wrong ends soon, everywhere, and says why."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from lightning_dist.checkpoint import load_full
from lightning_dist.strategies.base.ending.signal_handlers import SIGTERM_EXIT_CODE
from tests.helpers.processes.forked_runs import END_AFTER_KILL_SECONDS, WarmPython


def test_a_killed_rank_ends_the_other_and_leaves_the_checkpoint_before(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    arguments = ("--trouble", "sigkill", "--stage", "1", "--at", "5", "--root", str(root))
    with warm_python.trouble(tmp_path, "--schedule", "fsdp", *arguments) as run:
        assert run.wait(END_AFTER_KILL_SECONDS) == [1, -signal.SIGKILL]
    assert "process of rank 1 was lost" in run.output
    (path,) = root.glob("*.ckpt")
    checkpoint = load_full(path)
    assert checkpoint["global_step"] == 3
    assert len(checkpoint["state_dict"]) == len(checkpoint["optimizer_states"][0]["state"]) == 38


def test_sigterm_ends_all_ranks_at_one_batch_boundary(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    with warm_python.training(tmp_path, "--schedule", "fsdp", "--pause", "0.02") as run:
        time.sleep(0.3)
        for rank in (0, 1):
            run.send(signal.SIGTERM, rank)
        assert run.wait(15) == [SIGTERM_EXIT_CODE] * 2, run.output
    reports = [(tmp_path / f"report.{rank}").read_text().splitlines() for rank in (0, 1)]
    assert len(reports[0]) == len(reports[1])
