"""Where the threads of a process are that does not answer."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NAME = "stacks"


@contextmanager
def written_after(seconds: float) -> Iterator[None]:
    """Writes the stacks of all threads of this process once, if the block lasts for that long.

    Not at a signal: Lightning sets the handlers of all signals back that it knows. The block
    should wait when they are written, since no lock guards the frames of code that runs.
    """
    file = os.memfd_create(NAME)  # nothing is left in a folder when the process is killed
    faulthandler.dump_traceback_later(seconds, file=file)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        os.close(file)


def read(pid: int) -> str:
    """Returns what a process has written."""
    with suppress(FileNotFoundError):  # it may have ended
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                if os.readlink(file).startswith(f"/memfd:{NAME}"):
                    return file.read_text()
    return "(no stacks)"
