"""An interpreter that has imported everything, and forks processes that run a script.

Importing Lightning takes seconds, and a test in which something goes wrong needs processes of its
own. Each is a real one that ends as any other does, with its interpreter's finalization; only the
imports are behind it. Requests come as lines of JSON, and so do the answers.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import IO, Any, TypedDict


class Request(TypedDict):
    """What a process is to be.

    Attributes:
        script: The name of a module, run as ``python -m`` would.
        arguments: Of the script.
        environment: What a launcher would set for it.
        output: The file that takes its stdout and stderr.
        leads_group: Whether it gets a process group of its own, with what it starts.
    """

    script: str
    arguments: Sequence[str]
    environment: dict[str, str]
    output: str
    leads_group: bool


def _become(request: Request) -> None:
    # A shell that runs the tests in the background has its children ignore ctrl+c.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["leads_group"]:
        os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(request["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for own, inherited in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(own, inherited)
    os.environ.update(request["environment"])
    sys.argv = [request["script"], *request["arguments"]]


def _exit_code(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answers ``["start", request]`` with a process ID, ``["poll", pid]`` with an exit code.

    Returns when nothing more can come, and in each process that it has forked, when its script has
    ended.
    """
    while line := requests.readline():
        what, about = json.loads(line)
        answer: Any = _exit_code(about) if what == "poll" else os.fork()
        if what == "start" and answer == 0:
            answers.close()
            _become(about)
            runpy.run_module(about["script"], run_name="__main__", alter_sys=True)
            return
        if what == "start" and about["leads_group"]:
            with suppress(PermissionError, ProcessLookupError):  # the process itself was faster
                os.setpgid(answer, answer)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def main() -> None:
    gc.disable()
    for script in ("troubled_fit", "leave_script", "orphan_script"):
        import_module(f"tests.helpers.processes.{script}")
    for name in sys.argv[1:]:
        import_module(name)
    import_module("tests.helpers.processes.entry_points").read_entry_points_once()
    import_module("tests.helpers.processes.chosen_transport").use_chosen_transport()
    gc.freeze()  # else each process that ends spends seconds on freeing what was imported
    gc.enable()
    serve(sys.stdin.buffer.raw, os.fdopen(os.dup(1), "wb"))  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
