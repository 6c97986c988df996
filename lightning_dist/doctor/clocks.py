"""Clocks, and what ends or begins a run anew: signals, and restarts by the launcher."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from lightning_dist.doctor.check import Check, Run, worst_of
from lightning_dist.doctor.report import Result, ok, warn
from lightning_dist.engine.profiling.meters.clock_sync import exchange_pings
from lightning_dist.engine.profiling.record import ClockOffset

_MOST_SECONDS = 0.5  # by which clocks may differ


def _probe_clock(run: Run) -> tuple[ClockOffset, ...]:
    assert dist.group.WORLD is not None
    return exchange_pings(time.time, dist.group.WORLD)


def judge_clocks(run: Run, facts: Mapping[int, Sequence[ClockOffset]]) -> Result:
    """Judges by how much the clocks are ahead of rank 0's."""
    offsets = {run.hosts[rank]: offset.seconds for rank, offset in enumerate(facts[0])}
    late = [f"{host} by {off:+.1f} s" for host, off in offsets.items() if abs(off) > _MOST_SECONDS]
    if late:
        return warn(
            f"clocks differ from rank 0's: {', '.join(late)}",
            "Synchronise them (chronyc tracking, timedatectl). Logs of hosts do not line up, and"
            " files seem to be new or old.",
        )
    most = max(map(abs, offsets.values()))
    return ok(f"clocks differ by {most * 1e3:.1f} ms at most")


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


CLOCKS: tuple[Check[Any], ...] = (
    Check("clocks", _probe_clock, judge_clocks, "A rank does not answer.", 30.0),
    Check("signals", check_signals, worst_of, "Look at /proc/PID/status."),
    Check("restarts", check_restarts, worst_of, "Look at torchrun's options."),
)
