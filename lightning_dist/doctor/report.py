"""The doctor's report: a line for each check as it ends, or JSON of all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_dist.callbacks.output import print_tables
from lightning_dist.doctor.result import Result, Status

_NAME_WIDTH = 20


@dataclass
class Report:
    """The results so far.

    Attributes:
        as_json: Whether nothing is printed but JSON at the end.
        is_shown: Whether this rank prints at all.
        results: The results, by the names of their checks.
    """

    as_json: bool
    is_shown: bool
    results: dict[str, Result] = field(default_factory=dict)

    def add(self, name: str, result: Result) -> None:
        """Adds a result, and prints its line and its table."""
        self.results[name] = result
        if self.as_json or not self.is_shown:
            return
        print(f"{result.status.name:<6}{name:<{_NAME_WIDTH}}{result.found}", flush=True)
        if result.remedy:
            print(f"{'':<6}{'':<{_NAME_WIDTH}}-> {result.remedy}", flush=True)
        if result.table is not None:
            print_tables([result.table])

    @property
    def worst(self) -> Status:
        """The worst status so far."""
        return max((result.status for result in self.results.values()), default=Status.OK)

    def end(self, hosts: Mapping[int, str], left_out: Sequence[str]) -> None:
        """Prints what all of it comes to.

        Args:
            hosts: The hosts of the ranks that are known.
            left_out: Names of checks that were not run.
        """
        if not self.is_shown:
            return
        if self.as_json:
            print(json.dumps(self._document(hosts, left_out), indent=2), flush=True)
            return
        if left_out:
            print(f"Not checked after that: {', '.join(left_out)}.")
        counts = {
            status: sum(result.status is status for result in self.results.values())
            for status in Status
        }
        print(", ".join(f"{count} {status.name}" for status, count in counts.items()), flush=True)

    def _document(self, hosts: Mapping[int, str], left_out: Iterable[str]) -> dict[str, Any]:
        return {
            "status": self.worst.name,
            "hosts": hosts,
            "checks": [_entry(name, result) for name, result in self.results.items()],
            "not_checked": list(left_out),
        }


def _entry(name: str, result: Result) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": name,
        "status": result.status.name,
        "found": result.found,
        "remedy": result.remedy,
    }
    if result.table is not None:
        entry["table"] = [result.table.headings, *result.table.rows]
    return entry
