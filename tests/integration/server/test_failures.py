"""What of a parameter server outlives what, and how a run ends that does not."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from lightning_dist.strategies.base.ending.signal_handlers import SIGTERM_EXIT_CODE
from tests.faults.verdict import first_alarm
from tests.helpers.processes.forked_runs import (
    END_AFTER_KILL_SECONDS,
    END_SECONDS,
    WarmPython,
    errors_in,
)

IN_A_STEP = ("--trouble", "sigkill", "--at", "4")
MEETINGS = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_validation_start"),
    *("on_validation_end", "on_train_epoch_end", "on_save_checkpoint", "on_train_end"),
)


@pytest.mark.parametrize(
    "where", ["a step", *(pytest.param(hook, marks=pytest.mark.long) for hook in MEETINGS)]
)
def test_a_killed_worker_does_not_stop_the_others(
    warm_python: WarmPython, tmp_path: Path, where: str
) -> None:
    saves = () if where == "a step" else ("--root", str(tmp_path / "saved"))
    trouble = ("--sigkill-in", where) if saves else IN_A_STEP
    arguments = "--schedule", "async", "--stage", "2", *trouble, *saves
    with warm_python.trouble(tmp_path, *arguments, devices=3) as run:
        codes = run.wait(END_AFTER_KILL_SECONDS)
    assert codes == [0, 0, -signal.SIGKILL], run.output
    assert "process of rank 2 was lost (its connection closed). Going on." in run.output
    for rank in (0, 1):
        assert f"rank {rank} done after 12 steps" in run.output  # two epochs of six batches
    if saves:
        assert (tmp_path / "saved" / "epoch=1-step=12.ckpt").exists(), run.output


@pytest.mark.some("async-0")
@pytest.mark.parametrize(("mode", "killed"), [("sync", 1), ("bounded", 1), ("async", 0)], ids=str)
def test_a_killed_rank_ends_all_with_the_cause(
    warm_python: WarmPython, tmp_path: Path, mode: str, killed: int
) -> None:
    arguments = "--schedule", mode, "--trouble", "sigkill", "--stage", str(killed)
    with warm_python.trouble(tmp_path, *arguments) as run:
        codes = run.wait(END_AFTER_KILL_SECONDS)
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] == 1, run.output
    assert f"process of rank {killed} was lost" in run.output
    assert "Going on" not in run.output


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "killed", "hook"),
    [
        ("async", 2, "setup"),  # before there are servers
        ("async", 0, "on_train_start"),
        ("async", 0, "on_train_epoch_end"),
        ("async", 0, "on_save_checkpoint"),
        ("bounded", 2, "on_validation_end"),
        ("bounded", 2, "on_save_checkpoint"),
    ],
)
def test_a_rank_that_is_killed_where_ranks_meet_ends_all_with_the_cause(
    warm_python: WarmPython, tmp_path: Path, mode: str, killed: int, hook: str
) -> None:
    trouble = "--sigkill-in", hook, "--stage", str(killed), "--root", str(tmp_path / "saved")
    with warm_python.trouble(tmp_path, "--schedule", mode, *trouble, devices=3) as run:
        codes = run.wait(END_SECONDS)
    assert codes == [-signal.SIGKILL if rank == killed else 1 for rank in range(3)], run.output
    assert f"process of rank {killed} was lost" in first_alarm(run.output)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "async", "bounded"])
def test_a_users_exception_ends_all_ranks_and_is_shown_first(
    warm_python: WarmPython, tmp_path: Path, mode: str
) -> None:
    arguments = "--schedule", mode, "--trouble", "raise", "--stage", "1"
    with warm_python.trouble(tmp_path, *arguments) as run:
        assert run.wait(END_SECONDS) == [1, 1], run.output
    assert errors_in(run.output)[0] == "KeyError", run.output


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "async", "bounded"])
def test_sigterm_ends_all_ranks_behind_one_update(
    warm_python: WarmPython, tmp_path: Path, mode: str
) -> None:
    with warm_python.training(tmp_path, "--schedule", mode, "--pause", "0.02") as run:
        time.sleep(0.3)
        run.send(signal.SIGTERM, 1)
        assert run.wait(15) == [SIGTERM_EXIT_CODE] * 2, run.output
    reports = [(tmp_path / f"report.{rank}").read_text().splitlines() for rank in (0, 1)]
    assert len(reports[0]) == len(reports[1]) < 500
    assert "Error" not in run.output, run.output
