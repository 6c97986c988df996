"""The launcher that runs the user's script once per device, and lets a failed run end by itself.

Lightning's launcher kills all processes some seconds after one of its children has failed, maybe in
the middle of printing the reason. Here the ranks report a failure to each other and end by
themselves. So the launcher gives them the time for it, and then kills the processes that
are stuck. Lightning has no public name for its launcher, nor a hook for the failure of a child.
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
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_dist.engine.comms.failures.parent_watch import known_to_children
from lightning_dist.engine.comms.failures.peer_failure import GRACE_SECONDS
from lightning_dist.strategies.base.ending.signal_handlers import SIGTERM_EXIT_CODE
from lightning_dist.strategies.base.launching.launch_checks import check_launch

_POLL_SECONDS = 1
_SOUND_EXIT_CODES = (None, 0, SIGTERM_EXIT_CODE)


class ChildProcessObserver(_ChildProcessObserver):
    """Kills the remaining processes of a run some time after one of them has failed."""

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
        if all(child.returncode in _SOUND_EXIT_CODES for child in self._child_processes):
            return  # all ranks stop at one place, and the first one may have more to do
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
        if isinstance(self.cluster_environment, LightningEnvironment):
            check_launch(self.cluster_environment, self.num_processes, self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            with known_to_children():
                self._call_children_scripts()
            ChildProcessObserver(os.getpid(), self.procs).start()
        _set_num_threads_if_needed(self.num_processes)
        return function(*args, **kwargs)
