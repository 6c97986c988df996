"""A run in which something goes wrong ends soon, everywhere, and says why."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from lightning_dist.checkpoint import load_full
from tests.helpers.script_runs import STARTUP_SECONDS, child_of, script, training_script


@pytest.mark.parametrize(("devices", "stage"), [(2, 1), (3, 0)])
def test_a_users_exception_ends_all_ranks_and_is_shown_first(devices: int, stage: int) -> None:
    with script("--trouble", "raise", "--stage", str(stage), "--devices", str(devices)) as run:
        assert run.wait(STARTUP_SECONDS) == 1
    assert "timed out" not in run.output.lower()
    errors = re.findall(
        r"^(?:\[rank\d\]: )?(\w*(?:\.\w+)*(?:Error|Exception)): .*", run.output, re.M
    )
    assert errors[0] == "KeyError", errors
    assert "the user's own mistake" in run.output
    assert f"While rank {stage} ran action {stage}F" in run.output
    assert re.search(r"rank +0 .*F0", run.output), "the schedule must be drawn"
    assert re.search(r">F\d<", run.output), "with the action marked"


# The launcher, and a stage with a neighbour on either side.
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_others_and_is_named(tmp_path: Path, victim: int) -> None:
    root = tmp_path / "checkpoints"
    arguments = ["--devices", "3", "--root", str(root), "--trouble", "sigkill", "--at", "9"]
    with script(*arguments, "--stage", str(victim)) as run:
        start = time.monotonic()
        assert run.wait(STARTUP_SECONDS + 30) != 0
        assert time.monotonic() - start < STARTUP_SECONDS
    if victim == 0:  # the launcher itself is gone; its children speak for themselves
        assert "the process of rank 0 was lost" in run.output
    assert f"process of rank {victim} was lost" in run.output
    saved = finished_in(root)
    assert saved
    for path in saved:
        assert load_full(path)["global_step"] > 0


@pytest.mark.parametrize(
    ("schedule", "to_whom"), [("1f1b", "launcher"), ("pipedream", "child"), ("pipedream", "group")]
)
def test_sigterm_ends_all_ranks_at_one_batch_boundary(
    tmp_path: Path, schedule: str, to_whom: str
) -> None:
    with training_script(tmp_path, "--schedule", schedule, "--pause", "0.02") as run:
        time.sleep(0.3)
        if to_whom == "group":
            os.killpg(run.process.pid, signal.SIGTERM)
        elif to_whom == "launcher":
            run.process.terminate()
        else:
            os.kill(child_of(run.process.pid), signal.SIGTERM)
        assert run.wait(15) == 0, run.output
    last = [
        (tmp_path / f"report.{rank}").read_text().splitlines()[-1].split()[0] for rank in (0, 1)
    ]
    assert last[0] == last[1]
    assert "Error" not in run.output, run.output


def test_sigterm_ends_an_evaluation_at_one_batch_boundary(tmp_path: Path) -> None:
    with training_script(tmp_path, "--task", "predict", "--pause", "0.02") as run:
        time.sleep(0.3)
        os.kill(child_of(run.process.pid), signal.SIGTERM)
        assert run.wait(15) == 0, run.output
    reports = [(tmp_path / f"report.{rank}").read_text().splitlines() for rank in (0, 1)]
    assert len(reports[0]) == len(reports[1]) < 500
    assert "Error" not in run.output, run.output


def test_ctrl_c_ends_all_ranks_without_a_traceback(tmp_path: Path) -> None:
    with training_script(tmp_path, "--pause", "0.02") as run:
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.wait(15) == 1, run.output
    assert "Traceback" not in run.output, run.output


def finished_in(root: Path) -> list[Path]:
    return [path for path in root.glob("*") if not path.name.startswith(".")]


def is_saving(root: Path) -> bool:
    try:
        return any(root.glob(".*.saving/*"))
    except FileNotFoundError:  # renamed between two looks
        return False


def test_a_kill_while_saving_leaves_the_checkpoint_before_whole(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    with training_script(tmp_path, "--root", str(root)) as run:
        deadline = time.monotonic() + STARTUP_SECONDS
        while time.monotonic() < deadline:
            if is_saving(root) and len(finished_in(root)) >= 2:
                os.killpg(run.process.pid, signal.SIGKILL)
                break
        run.process.wait()
    finished = finished_in(root)
    assert len(finished) >= 2
    for path in finished:
        assert load_full(path)["state_dict"]
