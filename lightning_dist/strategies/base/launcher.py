"""The launcher that runs the user's script once per device, and lets a failed run end by itself.

Lightning's kills all processes some seconds after one of its children has failed, whatever they are
doing: with bad luck in the middle of printing why, or of closing a log. Here the ranks tell each
other of a failure and end by themselves (:mod:`.failures.failure_ring`,
:mod:`.failures.last_resort`), so the launcher gives them the time for it, and kills
only what is left then: a process that is stuck before it has met the others.

Lightning has no public name for its launcher, nor a hook for what it does when a child fails.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_dist.engine.comms.failures.parent_watch import known_to_children
from lightning_dist.engine.comms.failures.peer_failure import GRACE_SECONDS

_POLL_SECONDS = 1


class ChildProcessObserver(_ChildProcessObserver):
    """Kills what is left of a run some time after one of its processes has failed.

    Args:
        main_pid: The process that has started the others.
        child_processes: The others.
        patience_seconds: How long they have to end by themselves.
    """

    def __init__(
        self,
        main_pid: int,
        child_processes: list[subprocess.Popen[bytes]],
        patience_seconds: float = GRACE_SECONDS + 2,
    ) -> None:
        super().__init__(main_pid, child_processes, sleep_period=_POLL_SECONDS)
        self._patience_seconds = patience_seconds

    @override
    def _terminate_all(self) -> None:
        time.sleep(self._patience_seconds)  # the process takes this thread with it when it ends
        super()._terminate_all()


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script once more per further device of this node, unless a cluster has done so."""

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        self.cluster_environment.validate_settings(self.num_processes, self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            with known_to_children():
                self._call_children_scripts()
            ChildProcessObserver(os.getpid(), self.procs).start()
        _set_num_threads_if_needed(self.num_processes)
        return function(*args, **kwargs)
