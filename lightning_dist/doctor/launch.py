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

from lightning_dist.doctor.result import Result, fail, ok, warn

# As Lightning's Trainer asks them; the first that answers is taken.
_LAUNCHERS: tuple[tuple[type[ClusterEnvironment], str, str], ...] = (
    (TorchElasticEnvironment, "torchrun", "TORCHELASTIC_RUN_ID is set"),
    (SLURMEnvironment, "srun", "SLURM_NTASKS is set"),
    (LSFEnvironment, "jsrun", "LSB_JOBID and JSM_NAMESPACE_SIZE are set"),
    (MPIEnvironment, "mpirun", "mpi4py counts several processes"),
)
# How many processes a launcher has started, whether Lightning asks it or not.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", "WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch of this process."""

    launcher: str  # name of the launcher
    reason: str  # why Lightning takes it for the launcher
    is_detected: bool  # whether Lightning has found a cluster, or else uses its own environment
    rank: int  # this rank
    world_size: int  # number of all ranks
    local_rank: int  # this rank's index on its host
    ranks_per_host: int  # ranks on this host; 0 if it is not known
    address: str  # where the ranks meet
    port: int  # where the ranks meet
    serves: bool  # whether rank 0 serves that port, or else the launcher does

    @property
    def num_hosts(self) -> int:
        """The number of hosts; 1 if it is not known."""
        return self.world_size // self.ranks_per_host if self.ranks_per_host else 1


def find_environment() -> tuple[ClusterEnvironment, str, str]:
    """Finds the cluster environment as Lightning does.

    Returns:
        The environment, the launcher's name, and the reason for the choice.
    """
    for environment, launcher, reason in _LAUNCHERS:
        if environment.detect():
            return environment(), launcher, reason
    if "LOCAL_RANK" in os.environ:
        return LightningEnvironment(), "another launcher", "LOCAL_RANK is set"
    return LightningEnvironment(), "Lightning itself", "no launcher's variables are set"


def read_launch(environment: ClusterEnvironment, launcher: str, reason: str) -> Launch:
    """Reads the launch of this process from its environment, when all processes are started.

    Args:
        environment: The environment of :func:`find_environment`.
        launcher: Name of the launcher.
        reason: Reason for the choice.

    Raises:
        ValueError: A variable is missing, is no number, or does not go with another.
    """
    variables = os.environ
    is_detected = not isinstance(environment, LightningEnvironment)
    try:
        # SLURM's may read "2(x3),1".
        text = variables.get("LOCAL_WORLD_SIZE", variables.get("SLURM_NTASKS_PER_NODE", "0"))
        ranks_per_host = int(text) if text.isdigit() else 0
        local_rank = environment.local_rank()
        if is_detected:
            world_size, rank = environment.world_size(), environment.global_rank()
        else:
            world_size = int(variables.get("WORLD_SIZE", 1))
            rank = int(variables.get("RANK", environment.node_rank() * ranks_per_host + local_rank))
        launch = Launch(
            launcher=launcher,
            reason=reason,
            is_detected=is_detected,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            ranks_per_host=ranks_per_host,
            address=environment.main_address,
            port=environment.main_port,
            serves=variables.get("TORCHELASTIC_USE_AGENT_STORE") != str(True),
        )
    except KeyError as error:
        raise ValueError(f"the variable {error.args[0]} of {launcher} is not set") from error
    if not 0 <= rank < world_size or (ranks_per_host and not 0 <= local_rank < ranks_per_host):
        raise ValueError(
            f"rank {rank} of {world_size}, and {local_rank} of {ranks_per_host or 'some'} on its"
            " host, cannot be"
        )
    return launch


@dataclass(frozen=True, slots=True)
class LauncherFacts:
    """What could launch, or capture a launch."""

    sizes: tuple[tuple[str, int], ...]  # numbers of processes that launchers name in variables
    has_mpi4py: bool  # whether ``mpi4py`` is installed
    has_srun: bool  # whether ``srun`` is on the path


def find_launchers() -> LauncherFacts:
    """Gathers what could launch."""
    texts = [(name, os.environ.get(name, "")) for name in _SIZES]
    return LauncherFacts(
        sizes=tuple((name, int(text)) for name, text in texts if text.isdigit()),
        has_mpi4py=find_spec("mpi4py") is not None,
        has_srun=shutil.which("srun") is not None,
    )


def judge_launcher(launch: Launch, facts: LauncherFacts) -> Result:
    """Judges whether the launcher that Lightning takes is the one that has started the process."""
    found = f"{launch.launcher}, since {launch.reason}; {launch.world_size} ranks"
    if launch.is_detected:
        return ok(found)
    others = [f"{name}={size}" for name, size in facts.sizes if size not in (1, launch.world_size)]
    if others:
        return fail(
            f"{found}, but {', '.join(others)}",
            "Use one launcher only. Under mpirun install mpi4py; in a shell of salloc start with"
            " srun, or unset SLURM_NTASKS.",
        )
    if facts.has_mpi4py:
        return warn(
            f"{found}; mpi4py is installed, and each Trainer starts MPI to ask it",
            "If a Trainer hangs at its start, uninstall mpi4py, or give"
            " Trainer(plugins=LightningEnvironment()).",
        )
    if facts.has_srun:
        return warn(
            f"{found}; srun is on the path, and each Trainer warns that it is not used",
            "Start with srun if this is a SLURM job.",
        )
    return ok(found)
