"""An interpreter that has imported everything, and forks ranks that run a script.

Importing Lightning takes seconds, and a test in which something goes wrong needs processes of its
own. Each rank is a real process that ends as any other does, with its interpreter's finalization;
only the imports are behind it. Requests come as lines of JSON, and so do the answers.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, TypedDict

from tests.helpers import fit_script, leave_script

SCRIPTS = {"fit_script": fit_script.main, "leave_script": leave_script.main}


class Request(TypedDict):
    """What a rank is to be.

    Attributes:
        script: A key of ``SCRIPTS``.
        arguments: Of the script.
        environment: What a launcher would set for it.
        output: The file that takes its stdout and stderr.
    """

    script: str
    arguments: Sequence[str]
    environment: dict[str, str]
    output: str


def _become(request: Request) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(request["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for own, inherited in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(own, inherited)
    os.environ.update(request["environment"])
    sys.argv = [request["script"], *request["arguments"]]


def _exit_code(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def main() -> None:
    """Answers ``["start", request]`` with a process ID, ``["poll", pid]`` with an exit code."""
    gc.freeze()  # else each process that ends spends seconds on freeing what was imported
    while line := sys.stdin.buffer.raw.readline():  # type: ignore[attr-defined]
        what, about = json.loads(line)
        answer: Any = _exit_code(about) if what == "poll" else os.fork()
        if what == "start" and answer == 0:
            _become(about)
            SCRIPTS[about["script"]]()
            return
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
