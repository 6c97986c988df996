"""Results of checks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from lightning_dist.engine.common.table import Table


class Status(IntEnum):
    """How bad a result is; of several, the largest counts."""

    OK = 0
    WARN = 1  # a run works, but slower or less safely than it could
    FAIL = 2  # a run would fail, hang or give wrong weights


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a check.

    Attributes:
        status: How bad it is.
        found: What the check has found, in a line.
        remedy: What to change; empty if nothing is to be changed.
        table: Figures behind it.
    """

    status: Status
    found: str
    remedy: str = ""
    table: Table | None = None


def ok(found: str, table: Table | None = None) -> Result:
    """Returns a result that asks for nothing."""
    return Result(Status.OK, found, table=table)


def warn(found: str, remedy: str, table: Table | None = None) -> Result:
    """Returns a warning."""
    return Result(Status.WARN, found, remedy, table)


def fail(found: str, remedy: str, table: Table | None = None) -> Result:
    """Returns a failure."""
    return Result(Status.FAIL, found, remedy, table)
