"""How this process was launched: Lightning's choice of a cluster environment, and its reason."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from importlib.util import find_spec

from lightning.pytorch.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from lightning_dist.doctor.report import Result, StoppedError, fail, ok, warn
from lightning_dist.engine.comms.meeting import launcher_serves
from lightning_dist.strategies.base.launcher import STARTED

# As Lightning's Trainer asks them; the first that answers is taken.
_LAUNCHERS: tuple[tuple[type[ClusterEnvironment], str], ...] = (
    (TorchElasticEnvironment, "torchrun, since TORCHELASTIC_RUN_ID is set"),
    (SLURMEnvironment, "srun, since SLURM_NTASKS is set"),
    (LSFEnvironment, "jsrun, since LSB_JOBID and JSM_NAMESPACE_SIZE are set"),
    (MPIEnvironment, "mpirun, since mpi4py counts several processes"),
)
# How many processes a launcher has started, whether Lightning asks it or not.
_SIZES = (*STARTED, "SLURM_NTASKS", "WORLD_SIZE")
_NUMBERS = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_PORT"),
    *("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    *("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK"),
)
_REMEDY = "Start with one launcher, and no stale variables."


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch of this process."""

    origin: str  # the launcher, and why Lightning takes it for that
    is_detected: bool  # whether Lightning has found a cluster, or else uses its own environment
    rank: int  # this rank
    world_size: int  # number of all ranks
    local_rank: int  # this rank's index on its host
    ranks_per_host: int  # ranks on this host; 0 if it is not known
    address: str  # where the ranks meet
    port: int  # where the ranks meet
    serves: bool  # whether rank 0 serves that port, or else the launcher does


def find_environment() -> tuple[ClusterEnvironment, str]:
    """Finds the cluster environment as Lightning does, and names the launcher with the reason.

    Raises:
        StoppedError: Lightning refuses the variables of the launcher.
    """
    try:
        for environment, origin in _LAUNCHERS:
            if environment.detect():
                return environment(), origin
    except (RuntimeError, ValueError) as error:  # SLURM's variables do not go together
        raise StoppedError("launcher", fail(str(error), _REMEDY)) from error
    if "LOCAL_RANK" in os.environ:
        return LightningEnvironment(), "another launcher, since LOCAL_RANK is set"
    return LightningEnvironment(), "Lightning itself, since no launcher's variables are set"


def read_launch(environment: ClusterEnvironment, origin: str) -> Launch:
    """Reads the launch of this process from its environment, when all processes are started.

    Raises:
        StoppedError: A variable is missing, is no number, or does not go with another.
    """
    variables = os.environ
    is_detected = not isinstance(environment, LightningEnvironment)
    # SLURM's may read "2(x3),1".
    text = variables.get("LOCAL_WORLD_SIZE", variables.get("SLURM_NTASKS_PER_NODE", "0"))
    ranks_per_host = int(text) if text.isdigit() else 0
    try:
        local_rank = environment.local_rank()
        if is_detected:
            world_size, rank = environment.world_size(), environment.global_rank()
        else:
            world_size = int(variables.get("WORLD_SIZE", 1))
            rank = int(variables.get("RANK", environment.node_rank() * ranks_per_host + local_rank))
        if not 0 <= rank < world_size or (ranks_per_host and not 0 <= local_rank < ranks_per_host):
            of_host = f"{local_rank} of {ranks_per_host or 'some'} on its host"
            raise ValueError(f"rank {rank} of {world_size}, and {of_host}, cannot be")
        return Launch(
            origin=origin,
            is_detected=is_detected,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            ranks_per_host=ranks_per_host,
            address=environment.main_address,
            port=environment.main_port,
            serves=not launcher_serves(),
        )
    except KeyError as error:
        text = f"{origin}, but {error.args[0]} is not set"
        raise StoppedError("launcher", fail(text, _REMEDY)) from error
    except ValueError as error:
        odd = [
            f"{name}={variables[name]!r}"
            for name in _NUMBERS
            if not variables.get(name, "0").lstrip("-").isdigit()
        ]
        text = f"{origin}, but {', '.join(odd)} must be a number" if odd else str(error)
        raise StoppedError("launcher", fail(text, _REMEDY)) from error


def check_launcher(launch: Launch) -> Result:
    """Checks whether the launcher that Lightning takes is the one that has started the process."""
    found = f"{launch.origin}; {launch.world_size} ranks"
    if launch.is_detected:
        return ok(found)
    right = ("", "1", str(launch.world_size))
    sizes = {name: os.environ.get(name, "") for name in _SIZES}
    others = [f"{name}={size}" for name, size in sizes.items() if size not in right]
    if others:
        return fail(
            f"{found}, but {', '.join(others)}",
            "Use one launcher only. Under mpirun install mpi4py; in a shell of salloc start with"
            " srun, or unset SLURM_NTASKS.",
        )
    if find_spec("mpi4py") is not None:
        return warn(
            f"{found}; mpi4py is installed, and each Trainer starts MPI to ask it",
            "If a Trainer hangs at its start, uninstall mpi4py, or give"
            " Trainer(plugins=LightningEnvironment()).",
        )
    if shutil.which("srun") is not None:
        return warn(
            f"{found}; srun is on the path, and each Trainer warns that it is not used",
            "Start with srun if this is a SLURM job.",
        )
    return ok(found)
