"""Clocks, and what ends or begins a run anew: signals, and restarts by the launcher."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_dist.doctor.check import Check, Run, each
from lightning_dist.doctor.result import Result, ok, warn

_NUM_ROUNDS = 5
_MOST_SECONDS = 0.5  # by which clocks may differ


def probe_clock(run: Run, clock: Callable[[], float] = time.time) -> dict[int, float]:
    """Measures on rank 0 by how many seconds the clocks of other ranks are ahead of its own.

    Args:
        run: The run.
        clock: Reads this rank's clock.
    """
    if run.launch.rank > 0:
        for _ in range(_NUM_ROUNDS):
            dist.recv(torch.zeros(1, dtype=torch.float64), 0)
            dist.send(torch.tensor([clock()], dtype=torch.float64), 0)
        return {}
    return {rank: _offset_of(rank, clock) for rank in range(1, run.launch.world_size)}


def _offset_of(rank: int, clock: Callable[[], float]) -> float:
    """Returns the offset of the round with the shortest way; half of the way is its error."""
    rounds = []
    for _ in range(_NUM_ROUNDS):
        theirs = torch.zeros(1, dtype=torch.float64)
        before = clock()
        dist.send(theirs, rank)
        dist.recv(theirs, rank)
        after = clock()
        rounds.append((after - before, theirs.item() - (before + after) / 2))
    return min(rounds)[1]


def judge_clocks(run: Run, facts: Mapping[int, Mapping[int, float]]) -> Result:
    """Judges the offsets of all clocks."""
    offsets = {run.hosts[rank]: offset for rank, offset in facts[0].items()}
    late = [f"{host} by {offset:+.1f} s" for host, offset in offsets.items() if _is_off(offset)]
    if late:
        return warn(
            f"clocks differ from rank 0's: {', '.join(late)}",
            "Synchronise them (chronyc tracking, timedatectl). Logs of hosts do not line up, and"
            " files seem to be new or old.",
        )
    most = max(map(abs, offsets.values()), default=0.0)
    return ok(f"clocks differ by {most * 1e3:.1f} ms at most")


def _is_off(offset: float) -> bool:
    return abs(offset) > _MOST_SECONDS


@dataclass(frozen=True, slots=True)
class SignalFacts:
    """What signals would do to this process."""

    deaf: tuple[str, ...]  # signals that are blocked or ignored
    is_init: bool  # whether the process is the first of a container
    needs_scontrol: bool  # whether SLURM could requeue the job, but its command is missing


def probe_signals(run: Run) -> SignalFacts:
    """Looks at the signals that end a run."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    deaf = [n.name for n in numbers if n in blocked or signal.getsignal(n) is signal.SIG_IGN]
    is_slurm = "SLURM_JOB_ID" in os.environ
    return SignalFacts(tuple(deaf), os.getpid() == 1, is_slurm and not shutil.which("scontrol"))


def judge_signals(run: Run, facts: SignalFacts) -> Result:
    """Judges what signals would do to a process."""
    if facts.deaf:
        return warn(
            f"{', '.join(facts.deaf)} does not reach this process",
            "It was started by something that ignores or blocks it (a shell's & ignores SIGINT)."
            " A run could not save when it is asked to stop.",
        )
    if facts.is_init:
        return warn(
            "this process is number 1 of a container: signals without a handler do nothing",
            "Start the container with --init.",
        )
    if facts.needs_scontrol:
        return warn("scontrol is missing: SLURM cannot requeue", "Mount SLURM's commands.")
    return ok("SIGTERM, SIGINT and SIGUSR1 reach each process")


def _probe_restarts(run: Run) -> tuple[int, int]:
    """Returns this attempt, and how many may follow the first."""
    names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    attempt, most = (int(os.environ.get(name, "0")) for name in names)
    return attempt, most


def judge_restarts(run: Run, facts: tuple[int, int]) -> Result:
    """Judges restarts by torchrun."""
    attempt, most = facts
    if attempt:
        return warn(
            f"torchrun has restarted the processes {attempt} times",
            "See above why the first ones ended.",
        )
    if most:
        return ok(f"torchrun restarts up to {most} times: fit(ckpt_path=...) must name the newest")
    return ok("the launcher does not restart processes")


CLOCKS: tuple[Check[Any], ...] = (
    Check("clocks", probe_clock, judge_clocks, "A rank does not answer.", 30.0),
    Check("signals", probe_signals, each(judge_signals), "Look at /proc/PID/status."),
    Check("restarts", _probe_restarts, each(judge_restarts), "Look at torchrun's options."),
)
