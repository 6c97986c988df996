"""Results of checks, and their report: a line for each as it ends, or JSON of all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from lightning_dist.callbacks.output import print_tables
from lightning_dist.engine.common.table import Table

_NAME_WIDTH = 20


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


class StoppedError(Exception):
    """No further check is possible on this rank, since the named one has failed."""

    def __init__(self, check: str, result: Result) -> None:
        super().__init__(result.found)
        self.check, self.result = check, result


@dataclass
class Report:
    """The results so far, by the names of their checks.

    Attributes:
        as_json: Whether nothing is printed but JSON at the end.
        is_shown: Whether this rank prints at all.
    """

    as_json: bool
    is_shown: bool = True
    results: dict[str, Result] = field(default_factory=dict)

    def add(self, name: str, result: Result) -> None:
        """Adds a result, and prints its line and its table."""
        self.results[name] = result
        if self.as_json or not self.is_shown:
            return
        print(f"{result.status.name:<6}{name:<{_NAME_WIDTH - 1}} {result.found}", flush=True)
        if result.remedy:
            print(f"{'':<6}{'':<{_NAME_WIDTH}}-> {result.remedy}", flush=True)
        if result.table is not None:
            print_tables([result.table])

    @property
    def worst(self) -> Status:
        """The worst status so far."""
        return max((result.status for result in self.results.values()), default=Status.OK)

    def end(self, hosts: Mapping[int, str], left_out: Sequence[str]) -> None:
        """Prints what all of it comes to, and which checks were left out."""
        if not self.is_shown:
            return
        if self.as_json:
            checks: list[dict[str, object]] = []
            for name, it in self.results.items():
                own = {"status": it.status.name, "found": it.found, "remedy": it.remedy}
                checks.append({"name": name, **own})
                if it.table is not None:
                    checks[-1]["table"] = [it.table.headings, *it.table.rows]
            document = {"status": self.worst.name, "hosts": hosts, "checks": checks}
            print(json.dumps({**document, "not_checked": left_out}, indent=2), flush=True)
            return
        if left_out:
            print(f"Not checked after that: {', '.join(left_out)}.")
        statuses = [result.status for result in self.results.values()]
        counts = (f"{statuses.count(status)} {status.name}" for status in Status)
        print(", ".join(counts), flush=True)
