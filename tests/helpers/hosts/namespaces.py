"""Linux namespaces that a process of theirs keeps alive, and how others enter them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from shutil import which
from typing import Any

_KINDS = ("--net", "--pid", "--mount", "--uts", "--ipc")
_UNSHARE = ["unshare", *_KINDS, "--fork", "--kill-child", "--mount-proc"]
_PROGRAMS = ("unshare", "nsenter", "setpriv", "ip", "tc")


@cache
def why_no_hosts() -> str | None:
    """Returns why this machine can have no hosts of its own, or None."""
    if missing := [name for name in _PROGRAMS if which(name) is None]:
        return f"hosts need iproute2 and util-linux; not found: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "hosts are namespaces, and only root may make them"
    return _why_not(
        "ip link add bridge0 type bridge && ip link add port0 type veth peer name port1"
        " && tc qdisc add dev port0 root tbf rate 1gbit burst 256kb latency 50ms"
    )


@cache
def why_no_lossy_cable() -> str | None:
    """Returns why this machine's links can have no delay and no loss, or None."""
    return _why_not("ip tuntap add dev tap0 mode tap")


def _why_not(script: str) -> str | None:
    done = subprocess.run([*_UNSHARE, "sh", "-c", script], capture_output=True, text=True)
    return f"{script!r} failed: {done.stderr.strip()}" if done.returncode else None


class Namespaces:
    """Network, process, mount, name and IPC namespaces, as long as their first process lives.

    It ends when the process that made this object does, however that ends. Then the kernel kills
    all processes inside, and removes links and mounts.

    Attributes:
        pid: The first process, as others see it. Inside, its ID is 1.
    """

    def __init__(self, script: str, inside: Namespaces | None = None) -> None:
        """Creates the namespaces.

        Args:
            script: What a shell does in them first.
            inside: Namespaces whose mounts these inherit, and with whose first process they end.

        Raises:
            RuntimeError: The script failed.
        """
        # The shell stays, and so there is a first process that reaps what others have left.
        script = f"set -e; {script}\necho ready; cat > /dev/null; exit 0"
        command = [*_UNSHARE, "sh", "-c", script]
        if inside is not None:
            command = inside.entering(command)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # ctrl+c is for the tests, which then end this
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError(f"no namespaces: {self._process.communicate()[1]}")
        self.pid = _first_inside(self._process.pid)

    def entering(self, command: Sequence[str], *, folder: Path | None = None) -> list[str]:
        """Returns the command that runs another one in these namespaces, in a folder."""
        where = ["env", f"--chdir={folder or Path.cwd()}"]
        enter = ["nsenter", f"--target={self.pid}", *_KINDS]
        return [*enter, "setpriv", "--pdeathsig=KILL", *where, *command]

    def configure(self, program: str, lines: Sequence[str]) -> None:
        """Lets ``ip`` or ``tc`` do some lines in the network of these namespaces.

        Process IDs in the lines are those that this process sees.

        Raises:
            RuntimeError: A line failed.
        """
        enter = ["nsenter", f"--target={self.pid}", "--net"]
        script = "\n".join(lines)
        done = subprocess.run(
            [*enter, program, "-batch", "-"], input=script, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr}{script}")

    def output_of(self, *command: str) -> str:
        """Returns what a command prints in the network of these namespaces."""
        enter = ["nsenter", f"--target={self.pid}", "--net"]
        return subprocess.run([*enter, *command], check=True, capture_output=True, text=True).stdout

    def kill(self) -> None:
        """Sends SIGKILL to the first process, and so to all inside; returns when all are gone."""
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self._process.communicate()


class HostProcess(subprocess.Popen[str]):
    """A process in namespaces. Signals go to it, not to the ``nsenter`` that waits for it."""

    def __init__(
        self,
        namespaces: Namespaces,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """Starts the process, in this process's folder.

        Args:
            namespaces: Where it runs.
            command: The program and its arguments.
            env: Added to this process's environment.
            options: For ``subprocess.Popen``.
        """
        environment = {**os.environ, **(env or {})}
        options = {"text": True, "stdin": subprocess.DEVNULL, **options}
        super().__init__(namespaces.entering(command), env=environment, **options)

    @property
    def inner_pid(self) -> int:
        """The process as others see it.

        Raises:
            ProcessLookupError: It has ended.
        """
        while self.poll() is None:
            if inner := _children(self.pid):
                return inner[0]
            time.sleep(0.001)
        raise ProcessLookupError(f"{self.args!r} has ended")

    def send_signal(self, sig: int) -> None:
        """Sends a signal, unless the process has ended."""
        try:
            os.kill(self.inner_pid, sig)
            if sig == signal.SIGCONT:  # nsenter stops when its process does
                super().send_signal(sig)
        except ProcessLookupError:
            return


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _first_inside(pid: int) -> int:
    """Returns the first process of the namespaces that a descendant of a process has made."""
    while _inner_id(pid) != 1:
        (pid,) = _children(pid)
    return pid


def _inner_id(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("NSpid:"))
    return int(line.split()[-1])
