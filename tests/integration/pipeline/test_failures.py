"""A run in which something goes wrong ends soon, everywhere, and says why."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from lightning_dist.checkpoint import load_full
from lightning_dist.strategies.base.ending.signal_handlers import SIGTERM_EXIT_CODE
from tests.helpers.networks.chosen import chosen
from tests.helpers.processes.forked_runs import (
    END_AFTER_KILL_SECONDS,
    END_SECONDS,
    STARTUP_SECONDS,
    WarmPython,
    errors_in,
)


def check_users_exception(output: str, stage: int) -> None:
    assert "timed out" not in output.lower()
    assert errors_in(output)[0] == "KeyError", output
    assert "the user's own mistake" in output
    assert f"While rank {stage} ran action {stage}F" in output
    assert re.search(r"rank +0 .*F0", output), "the schedule must be drawn"
    assert re.search(r">F\d<", output), "with the action marked"


def test_a_users_exception_ends_all_ranks_and_is_shown_first(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    with warm_python.trouble(tmp_path, "--trouble", "raise", "--stage", "0", devices=3) as run:
        assert run.wait(END_SECONDS) == [1, 1, 1]
    check_users_exception(run.output, 0)


def check_checkpoints(root: Path) -> None:
    saved = finished_in(root)
    assert saved
    for path in saved:
        assert load_full(path)["global_step"] > 0


KILLED = ("--trouble", "sigkill", "--at", "9")


def test_a_killed_rank_ends_its_neighbours_and_is_named(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    with warm_python.trouble(
        tmp_path, *KILLED, "--stage", "1", "--root", str(root), devices=3
    ) as run:
        assert run.wait(END_AFTER_KILL_SECONDS) == [1, -signal.SIGKILL, 1]
    assert "process of rank 1 was lost" in run.output
    check_checkpoints(root)


def check_end_at_one_boundary(folder: Path, output: str) -> None:
    reports = [(folder / f"report.{rank}").read_text().splitlines() for rank in (0, 1)]
    assert reports[0][-1].split()[0] == reports[1][-1].split()[0]
    assert len(reports[0]) == len(reports[1]) < 500
    assert "Error" not in output, output


@pytest.mark.some("fit-?1?")
@pytest.mark.parametrize(
    ("task", "ranks"), [("fit", [1]), ("fit", [0, 1]), ("predict", [1])], ids=str
)
def test_sigterm_ends_all_ranks_at_one_batch_boundary(
    warm_python: WarmPython, tmp_path: Path, task: str, ranks: list[int]
) -> None:
    with warm_python.training(tmp_path, "--task", task, "--pause", "0.02") as run:
        time.sleep(0.3)
        for rank in ranks:
            run.send(signal.SIGTERM, rank)
        assert run.wait(15) == [SIGTERM_EXIT_CODE] * 2, run.output
    check_end_at_one_boundary(tmp_path, run.output)


def test_sigterm_before_lightning_handles_it_ends_all_ranks_at_one_batch_boundary(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    told = ("--sigterm-in", "setup", "--stage", "1", "--report", str(tmp_path / "report"))
    with warm_python.ranks(tmp_path, *told) as run:
        assert run.wait(STARTUP_SECONDS) == [SIGTERM_EXIT_CODE] * 2, run.output
    check_end_at_one_boundary(tmp_path, run.output)
    assert "has fitted" not in run.output


def test_sigterm_behind_the_last_batch_ends_the_next_run(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    told = ("--sigterm-in", "on_train_end", "--stage", "1", "--task", "fit, validate")
    with warm_python.ranks(tmp_path, *told) as run:
        assert run.wait(STARTUP_SECONDS) == [SIGTERM_EXIT_CODE] * 2, run.output
    assert run.output.count("has fitted") == 2, run.output
    assert "done after" not in run.output, run.output


def finished_in(root: Path) -> list[Path]:
    return [path for path in root.glob("*") if not path.name.startswith(".")]


def is_saving(root: Path) -> bool:
    try:
        return any(root.glob(".*.saving/*"))
    except FileNotFoundError:  # renamed between two looks
        return False


def test_a_kill_while_saving_leaves_the_checkpoint_before_whole(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    with warm_python.training(tmp_path, "--root", str(root)) as run:
        deadline = time.monotonic() + STARTUP_SECONDS
        while time.monotonic() < deadline:
            if is_saving(root) and len(finished_in(root)) >= 2:
                for rank in (0, 1):
                    run.send(signal.SIGKILL, rank)
                break
        assert run.wait(5) == [-signal.SIGKILL] * 2
    finished = finished_in(root)
    assert len(finished) >= 2
    for path in finished:
        assert load_full(path)["state_dict"]


# --- runs that mostly wait, for a process that imports everything or for a grace ------------------


def a_failed_rank_does_not_wait_for_one_that_hangs(python: WarmPython, folder: Path) -> None:
    arguments = ("--trouble", "raise later", "--stage", "0")
    with python.trouble(folder, *arguments, devices=3) as run:
        run.send(signal.SIGSTOP, 1)
        deadline = time.monotonic() + END_SECONDS
        while (codes := run.exit_codes()) != [1, None, 1]:
            assert time.monotonic() < deadline, f"{codes}\n{run.output}"
            time.sleep(0.05)
    check_users_exception(run.output, 0)


def a_users_exception_ends_what_the_launcher_started(python: WarmPython, folder: Path) -> None:
    with python.troubled_launcher(folder, "--trouble", "raise", "--stage", "1") as run:
        assert run.wait(END_SECONDS) == [1]
    check_users_exception(run.output, 1)


def a_killed_launcher_ends_its_children_and_is_named(python: WarmPython, folder: Path) -> None:
    root = folder / "checkpoints"
    arguments = (*KILLED, "--devices", "3", "--stage", "0", "--root", str(root))
    with python.troubled_launcher(folder, *arguments) as run:
        assert run.wait(END_AFTER_KILL_SECONDS) == [-signal.SIGKILL]
    assert "the process of rank 0 was lost" in run.output  # its children speak for themselves
    check_checkpoints(root)


def a_launcher_that_is_killed_before_its_children_come_ends_them(
    python: WarmPython, folder: Path
) -> None:
    with python.launcher(folder) as run:
        children = Path(f"/proc/{run.pids[0]}/task/{run.pids[0]}/children")
        deadline = time.monotonic() + STARTUP_SECONDS
        while not children.read_text():
            assert time.monotonic() < deadline, run.output
            time.sleep(0.02)
        run.send(signal.SIGKILL, 0)
        # They import first, which takes its time beside other tests.
        run.wait(STARTUP_SECONDS + END_AFTER_KILL_SECONDS)
    assert "was lost before the ranks had met" in run.output


def sigterm_of_the_launcher_ends_all_ranks_at_one_batch_boundary(
    python: WarmPython, folder: Path
) -> None:
    arguments = ("--schedule", "1f1b", "--pause", "0.02")
    with python.training_launcher(folder, *arguments) as run:
        time.sleep(0.3)
        run.send(signal.SIGTERM, 0)
        assert run.wait(15) == [SIGTERM_EXIT_CODE], run.output
    check_end_at_one_boundary(folder, run.output)


def ctrl_c_ends_all_ranks_without_a_traceback(python: WarmPython, folder: Path) -> None:
    with python.training_launcher(folder, "--pause", "0.02") as run:
        os.killpg(run.pids[0], signal.SIGINT)
        assert run.wait(15) == [1], run.output
    assert "Traceback" not in run.output, run.output


def a_stopped_rank_is_named_while_the_others_wait_for_it(python: WarmPython, folder: Path) -> None:
    arguments = ("--epochs", "40", "--pause", "0.01", "--timeout", "8")  # missed after 4 s
    with python.training(folder, *arguments, devices=3) as run:
        run.send(signal.SIGSTOP, 1)
        named = f"Rank 1 (process {run.pids[1]} on {socket.gethostname()}) has not answered for"
        run.wait_for_output(named)
        assert "It was training, epoch " in run.output, run.output
        assert "timeout_s=8" in run.output, run.output
        run.send(signal.SIGCONT, 1)
        run.wait_for_output(f"Rank 1 (process {run.pids[1]} on {socket.gethostname()}) goes on")
        assert run.wait(STARTUP_SECONDS) == [0, 0, 0], run.output
    assert "Error" not in run.output, run.output


def a_rank_that_stays_stopped_ends_the_run_at_the_timeout(python: WarmPython, folder: Path) -> None:
    with python.training_launcher(folder, "--timeout", "20") as run:
        child = child_of(run.pids[0])
        os.kill(child, signal.SIGSTOP)
        # Its predecessor kills what it has started, for a stopped process does not end by itself.
        assert run.wait(20 + END_AFTER_KILL_SECONDS) == [1], run.output
    assert f"Rank 1 (process {child} on " in run.output, run.output
    assert "Rank 1 failed first: Rank 1 (process" in run.output, run.output


def a_rank_that_waits_for_a_file_is_named(python: WarmPython, folder: Path) -> None:
    pipe = folder / "trouble.pipe"
    os.mkfifo(pipe)
    arguments = ("--trouble", "read a pipe", "--stage", "1", "--timeout", "8")
    with python.trouble(folder, *arguments, devices=3) as run:
        run.wait_for_output(f"Rank 1 (process {run.pids[1]} on {socket.gethostname()}) has been")
        assert "epoch 0, batch 4, in `read_pipe` (troubled_fit.py:" in run.output, run.output
        pipe.write_bytes(b"")
        assert run.wait(STARTUP_SECONDS) == [0, 0, 0], run.output
    assert "Rank 0" not in run.output, run.output
    assert "Rank 2" not in run.output, run.output


def a_rank_that_waits_for_ever_is_the_cause_of_the_others_timeouts(
    python: WarmPython, folder: Path
) -> None:
    os.mkfifo(folder / "trouble.pipe")
    arguments = ("--schedule", "ddp", "--trouble", "read a pipe", "--stage", "1", "--timeout", "15")
    with python.trouble(folder, *arguments) as run:
        assert run.wait(15 + END_AFTER_KILL_SECONDS) == [1, 1], run.output
    assert "Rank 1 failed first: Rank 1 (process" in run.output, run.output
    assert "in `read_pipe` (troubled_fit.py:" in run.output, run.output


def a_rank_that_cannot_save_is_named(python: WarmPython, folder: Path) -> None:
    pipe = folder / "trouble.pipe"
    os.mkfifo(pipe)
    arguments = ("--schedule", "ddp", "--timeout", "8", "--trouble", "save into a pipe", "--epochs")
    with python.trouble(folder, *arguments, "1", "--root", str(folder / "checkpoints")) as run:
        run.wait_for_output(f"Rank 0 (process {run.pids[0]} on {socket.gethostname()}) has been")
        assert f"It is saving {folder}/checkpoints/" in run.output, run.output
        pipe.write_text("")
        assert run.wait(STARTUP_SECONDS) == [0, 0], run.output
    assert "Rank 1" not in run.output, run.output


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


Run = Callable[[WarmPython, Path], None]
RUNS: list[Run] = [
    a_failed_rank_does_not_wait_for_one_that_hangs,
    a_users_exception_ends_what_the_launcher_started,
    a_killed_launcher_ends_its_children_and_is_named,
    a_launcher_that_is_killed_before_its_children_come_ends_them,
    sigterm_of_the_launcher_ends_all_ranks_at_one_batch_boundary,
    ctrl_c_ends_all_ranks_without_a_traceback,
    a_stopped_rank_is_named_while_the_others_wait_for_it,
    a_rank_that_stays_stopped_ends_the_run_at_the_timeout,
    a_rank_that_waits_for_a_file_is_named,
    a_rank_that_waits_for_ever_is_the_cause_of_the_others_timeouts,
    a_rank_that_cannot_save_is_named,
]


@pytest.fixture(scope="module", autouse=True)
def runs(
    request: pytest.FixtureRequest,
    warm_python: WarmPython,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[Run, Future[None]]]:
    """All of them, while the tests before run: most of the time each waits."""
    with ThreadPoolExecutor(3) as pool:
        yield {
            run: pool.submit(run, warm_python, tmp_path_factory.mktemp("run"))
            for run in chosen(request.session, "runs", "run", request.path)
        }


@pytest.mark.some("a_rank_that_waits_for_a_file_*")
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_how_it_ends(run: Run, runs: dict[Run, Future[None]]) -> None:
    runs[run].result()
