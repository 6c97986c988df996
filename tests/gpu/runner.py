"""Runs pieces one after the other, each in a process of its own with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tests.gpu.catalog import PIECES
from tests.gpu.records import End, Folder, Record, describe_machine
from tests.gpu.setting import Setting

ROOT = Path(__file__).parents[2]
LOOK_SECONDS = 0.2
NOTE_LINES = 15


def run_piece(
    name: str,
    setting: Setting,
    folder: Folder,
    limit_seconds: float,
    watch: Callable[[Record | None], None] = lambda _: None,
) -> Record:
    """Runs a piece, and keeps its record.

    Args:
        name: Name of the piece.
        setting: Where it runs.
        folder: Where its record is kept, in place of an earlier one.
        limit_seconds: When it is ended, with all processes that it has started.
        watch: Called now and then with the record so far.
    """
    folder.file_of(name).unlink(missing_ok=True)
    arguments = [name, setting.device, setting.transport, str(folder.path)]
    began = time.monotonic()
    with tempfile.TemporaryFile(mode="w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.one_piece", *arguments],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its processes can be ended with it
        )
        end = End.DONE
        try:
            while process.poll() is None:
                if time.monotonic() - began > limit_seconds:
                    end = End.TIMED_OUT
                    break
                watch(folder.read(name))
                time.sleep(LOOK_SECONDS)
        finally:
            _end_all(process)
        output.seek(0)
        tail = "\n".join(output.read().splitlines()[-NOTE_LINES:])
    if process.returncode != 0 and end is End.DONE:
        end = End.CRASHED
    record = folder.read(name) or Record(name, describe_machine(setting))
    note = "" if end is End.DONE else tail
    record = replace(record, end=end, seconds=time.monotonic() - began, note=note)
    folder.write(record)
    return record


def _end_all(process: subprocess.Popen[str]) -> None:
    """Ends a process and all that it has started, which share its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def choose(folder: Folder, only: Sequence[str], *, again: bool) -> list[str]:
    """Returns the pieces to run, in the catalog's order.

    Args:
        folder: The records that there are.
        only: Names of pieces; none of them stands for all.
        again: Whether pieces that have a record run anew.

    Raises:
        ValueError: There is no piece of a name.
    """
    unknown = [name for name in only if name not in PIECES]
    if unknown:
        raise ValueError(f"There is no piece {unknown[0]!r}; the pieces are {', '.join(PIECES)}.")
    wanted = [name for name in PIECES if not only or name in only]
    return wanted if again else folder.missing(wanted)
