"""What a run with faults must have printed first: the true cause."""

from __future__ import annotations

import re

from tests.faults.case import LAUNCHER, Case, Fault, Kind
from tests.faults.training import MISTAKE

# Lines that say that something is wrong: exceptions, and what the package, Lightning, torchrun and
# the C library say of signals and lost processes.
_ALARM = re.compile(
    r"""^(\[rank\ ?\d+\]:?\ )?[\w.]*(Error|Exception|Interrupt|Exit)(:\ .*)?$
    | \bfailed\ first\b | \bwas\ lost\b | has\ not\ answered | \bSIG[A-Z0-9]{3,}\b | death\ signal
    | exitcode:\ - | terminate\ called | ^Fatal | ^Aborted | Segmentation | was\ not\ saved
    """,
    re.VERBOSE,
)
_LOST = r"was lost|Signal (9|10|15) |SIGKILL|SIGUSR1|exitcode: -"
_CAUSES: dict[Kind, str] = {
    "SIGKILL": _LOST,
    "SIGUSR1": _LOST,
    "SIGTERM": r"SIGTERM|death signal|exitcode: -15|was lost",
    "SIGSTOP": r"has not answered",
    "stopped for good": r"has not answered",
    "link cut": r"has not answered",
    "link cut for good": r"has not answered",
    "host killed": r"was lost",
    "host lost": r"has not answered",
    "raise": re.escape(MISTAKE),
    "disk full": r"No space left",
}
_LAUNCHER_LOST = r"its process was lost"


# What torchrun does when a process has ended, before it says why.
_CONSEQUENCE = "closing signal SIG"


def first_alarm(output: str) -> str:
    """Returns the first line that says that something is wrong; empty if there is none."""
    lines = (line for line in output.splitlines() if _CONSEQUENCE not in line)
    return next((line for line in lines if _ALARM.search(line)), "")


def has_true_cause_first(case: Case, came: list[Fault], output: str) -> bool:
    """Returns whether the first alarm names a fault; a run without any is silent too."""
    alarm = first_alarm(output)
    if not alarm:  # what was killed cannot say so, nor what goes on
        quiet: tuple[Kind, ...] = ("SIGKILL", "SIGUSR1", "SIGSTOP", "SIGTERM", "link cut")
        return all(fault.kind in quiet for fault in came)
    return any(re.search(_cause_of(fault), alarm) for fault in came)


def _cause_of(fault: Fault) -> str:
    is_launcher = fault.target == LAUNCHER and fault.kind == "SIGKILL"
    return f"{_CAUSES[fault.kind]}|{_LAUNCHER_LOST}" if is_launcher else _CAUSES[fault.kind]
