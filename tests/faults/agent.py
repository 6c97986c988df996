"""torchrun, but that its ranks need import nothing.

It is torch's own command. Where that starts a process, one is forked from a sibling of this
process, which has imported everything and does nothing else. The forked process gets the
environment and the process group that it would have got, and ends as any other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO, Any, ClassVar

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from tests.helpers.processes.warm_python import serve


class ForkedProcess:
    """Stands in for ``subprocess.Popen``."""

    output: ClassVar[str]
    to_sibling: ClassVar[IO[bytes]]
    from_sibling: ClassVar[IO[bytes]]

    def __init__(self, args: Sequence[str], env: dict[str, str], **_: Any) -> None:
        command = args[args.index("-m") + 1 :]
        request = {
            "script": command[0],
            "arguments": command[1:],
            "environment": env,
            "output": self.output,
            "leads_group": True,
        }
        self.args = args
        self.returncode: int | None = None
        self.pid: int = self._ask("start", request)

    def _ask(self, what: str, about: Any) -> Any:
        self.to_sibling.write(json.dumps([what, about]).encode() + b"\n")
        return json.loads(self.from_sibling.readline())

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or float("inf"))
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    reading, writing = os.pipe()
    return open(reading, "rb", buffering=0), open(writing, "wb", buffering=0)


def main() -> None:
    """Takes the folder of the run, the file for the output, and torchrun's arguments."""
    folder, ForkedProcess.output, *arguments = sys.argv[1:]
    os.chdir(folder)
    (asked, ForkedProcess.to_sibling), (ForkedProcess.from_sibling, answered) = _pipe(), _pipe()
    if os.fork() == 0:
        ForkedProcess.to_sibling.close()
        serve(asked, answered)
        return
    asked.close()
    answered.close()
    setattr(subprocess_handler, "Popen", ForkedProcess)  # noqa: B010
    run.main(arguments)


if __name__ == "__main__":
    main()
