"""Checks clocks, signals and restarts: what only shows when a run has failed or is asked to stop.

Logs of hosts with different clocks do not line up. A process that ignores SIGTERM cannot save.
"""

from __future__ import annotations

import os
import shutil
import signal
import time

import torch.distributed as dist

from lightning_dist.doctor.check import Check, Run, worst_of
from lightning_dist.doctor.report import Result, ok, warn
from lightning_dist.engine.profiling.meters.clock_sync import exchange_pings

_MOST_SECONDS = 0.5  # by which clocks may differ


def _check_clock(run: Run) -> Result:
    assert dist.group.WORLD is not None
    return judge_clock(exchange_pings(time.time, dist.group.WORLD)[run.launch.rank].seconds)


def judge_clock(seconds: float) -> Result:
    """Judges by how much a clock is ahead of rank 0's."""
    if abs(seconds) > _MOST_SECONDS:
        return warn(
            f"the clock is {seconds:+.1f} s from rank 0's",
            "Synchronise them (chronyc tracking, timedatectl). Logs of hosts do not line up, and"
            " files seem to be new or old.",
        )
    return ok(f"clocks differ by less than {_MOST_SECONDS} s")


def check_signals(run: Run) -> Result:
    """Checks what the signals that end a run would do to this process."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    deaf = [n.name for n in numbers if n in blocked or signal.getsignal(n) is signal.SIG_IGN]
    if deaf:
        return warn(
            f"{', '.join(deaf)} does not reach this process",
            "It was started by something that ignores or blocks it (a shell's & ignores SIGINT)."
            " A run could not save when it is asked to stop.",
        )
    if os.getpid() == 1:
        return warn(
            "this process is number 1 of a container: signals without a handler do nothing",
            "Start the container with --init.",
        )
    if "SLURM_JOB_ID" in os.environ and not shutil.which("scontrol"):
        return warn("scontrol is missing: SLURM cannot requeue", "Mount SLURM's commands.")
    return ok("SIGTERM, SIGINT and SIGUSR1 reach each process")


def check_restarts(run: Run) -> Result:
    """Checks how often torchrun has restarted the processes, and may do so."""
    names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    attempt, most = (int(os.environ.get(name, "0")) for name in names)
    if attempt:
        return warn(
            f"torchrun has restarted the processes {attempt} times",
            "See above why the first ones ended.",
        )
    if most:
        return ok(f"torchrun restarts up to {most} times: fit(ckpt_path=...) must name the newest")
    return ok("the launcher does not restart processes")


CLOCKS = (
    Check("clocks", _check_clock, worst_of, "A rank does not answer.", 30.0),
    Check("signals", check_signals, worst_of, "Look at /proc/PID/status."),
    Check("restarts", check_restarts, worst_of, "Look at torchrun's options."),
)
