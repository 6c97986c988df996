"""Checks of how processes were launched, where Lightning's own variables say it.

The other launchers' environments check theirs: Lightning does so by ``validate_settings``.
"""

from __future__ import annotations

import os

from lightning.pytorch.plugins.environments import LightningEnvironment

STARTED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables in which ``mpirun`` and ``srun`` say how many processes they have started."""


def check_launch(environment: LightningEnvironment, num_processes: int, num_nodes: int) -> None:
    """Checks that the launched processes are those that the Trainer asks for.

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
