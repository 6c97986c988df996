"""The launcher that runs the user's script once per device, and lets a failed run end by itself.

Lightning's launcher kills all processes some seconds after one of its children has failed, maybe in
the middle of printing the reason. Here the ranks report a failure to each other and end by
themselves. So the launcher gives them the time for it, and then kills the processes that
are stuck. Lightning has no public name for its launcher, nor a hook for the failure of a child.
"""

from __future__ import annotations

import os
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

STARTED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables in which ``mpirun`` and ``srun`` say how many processes they have started."""

_POLL_SECONDS = 1
_SOUND_EXIT_CODES = (None, 0, SIGTERM_EXIT_CODE)


class ChildProcessObserver(_ChildProcessObserver):
    """Kills the remaining processes of a run some time after one of them has failed."""

    patience_seconds = GRACE_SECONDS + 2.0

    @override
    def _terminate_all(self) -> None:
        if all(child.returncode in _SOUND_EXIT_CODES for child in self._child_processes):
            return  # all ranks stop at one place, and the first one may have more to do
        time.sleep(self.patience_seconds)  # the process takes this thread with it when it ends
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
            ChildProcessObserver(os.getpid(), self.procs, _POLL_SECONDS).start()
        _set_num_threads_if_needed(self.num_processes)
        return function(*args, **kwargs)


def check_launch(environment: LightningEnvironment, num_processes: int, num_nodes: int) -> None:
    """Checks that the launched processes are those that the Trainer asks for.

    The other launchers' environments check theirs: Lightning does so by ``validate_settings``.

    Raises:
        ValueError: They are not, or could not meet.
    """
    asked = environment.world_size()  # a subclass, such as Ray's, may know better than `devices`
    product = f"devices={num_processes} and num_nodes={num_nodes}"
    if environment.creates_processes_externally:
        launched = os.environ.get("WORLD_SIZE", str(asked))
        if launched != str(asked):
            raise ValueError(
                f"The Trainer asks for {product}, {asked} in all, and WORLD_SIZE={launched}"
                " says that a launcher has started others. Give the Trainer as many `devices` on"
                " each of `num_nodes` hosts as the launcher starts."
            )
    else:
        for name in STARTED:
            started = os.environ.get(name, "1")
            if asked > 1 and started != "1":
                raise ValueError(
                    f"{name}={started}: a launcher has started {started} processes, and each"
                    f" Trainer would start {product} of its own. Use one launcher only: under"
                    " mpirun install mpi4py, start with srun from a batch script (an interactive"
                    f" job is not detected), or unset {name}."
                )
    if not 0 <= environment.global_rank() < asked:
        raise ValueError(
            f"NODE_RANK={environment.node_rank()} and LOCAL_RANK={environment.local_rank()} do not"
            f" fit {product}. Number the hosts by NODE_RANK=0 to {num_nodes - 1}, or set"
            " `num_nodes` of the Trainer to the number of hosts."
        )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if num_nodes > 1 and missing:
        raise ValueError(
            f"num_nodes={num_nodes}, and {' and '.join(missing)} not set: the hosts cannot meet."
            " Set MASTER_ADDR (of the first host), MASTER_PORT and NODE_RANK on each host, or start"
            " with torchrun; or set num_nodes=1."
        )
    port = os.environ.get("MASTER_PORT", "1")
    if not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(f"MASTER_PORT={port!r} must be a number from 1 to 65535.")
