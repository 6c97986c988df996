"""A run in which something goes wrong ends soon, everywhere, and says why."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightning_dist.checkpoint import load_full

# Starting Python and importing Lightning on a busy machine; the rest is the bound under test.
STARTUP_SECONDS = 40.0


@dataclass
class Run:
    process: subprocess.Popen[str]
    output: str = ""

    def wait(self, seconds: float) -> int:
        """Waits for the whole process group; gives the main process's exit code."""
        deadline = time.monotonic() + seconds
        self.output = self.process.communicate(timeout=seconds)[0]
        while group_exists(self.process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not group_exists(self.process.pid), "a process was left behind"
        return self.process.returncode


def group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def script(*arguments: str) -> Iterator[Run]:
    command = [sys.executable, "-m", "tests.helpers.fit_script", *arguments]
    environment = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE")}
    run = Run(
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=environment,
            # A shell that runs the tests in the background has its children ignore ctrl+c.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    )
    try:
        yield run
    finally:
        if group_exists(run.process.pid):
            os.killpg(run.process.pid, signal.SIGKILL)
        if run.process.stdout is not None and not run.process.stdout.closed:
            run.process.communicate()


@contextmanager
def training_script(tmp_path: Path, *arguments: str) -> Iterator[Run]:
    """A script that is in the middle of its training."""
    report = tmp_path / "report"
    with script("--report", str(report), "--epochs", "200", *arguments) as run:
        deadline = time.monotonic() + STARTUP_SECONDS
        while not (tmp_path / "report.1").exists():
            assert run.process.poll() is None, run.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield run


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


@pytest.mark.parametrize("victim", [0, 1, 2])
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
    saved = sorted(p for p in root.iterdir() if not p.name.startswith("."))
    assert saved
    for path in saved:
        assert load_full(path)["global_step"] > 0


@pytest.mark.parametrize("to_whom", ["launcher", "child", "group"])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
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


@pytest.mark.parametrize("task", ["validate", "predict"])
def test_sigterm_ends_an_evaluation_at_one_batch_boundary(tmp_path: Path, task: str) -> None:
    with training_script(tmp_path, "--task", task, "--pause", "0.02") as run:
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


def child_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0])


def test_a_kill_while_saving_leaves_the_checkpoint_before_whole(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    with training_script(tmp_path, "--root", str(root)) as run:
        deadline = time.monotonic() + STARTUP_SECONDS
        while time.monotonic() < deadline:
            busy = list(root.glob(".*.saving/*"))
            if busy and len([p for p in root.iterdir() if not p.name.startswith(".")]) >= 2:
                os.killpg(run.process.pid, signal.SIGKILL)
                break
        run.process.wait()
    finished = [p for p in root.iterdir() if not p.name.startswith(".")]
    assert len(finished) >= 2
    for path in finished:
        assert load_full(path)["state_dict"]
