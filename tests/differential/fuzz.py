"""Run cases that hypothesis draws, for as long as is wanted, and keep the smallest that fails."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky

from tests.differential.case import Case
from tests.differential.check import Pool, RefusedError, find_differences
from tests.differential.draw import cases
from tests.differential.machine import ON_CPU, Machine

CASES_PER_ROUND = 20


class _DiffersError(AssertionError):
    """A case is not as on one device."""


@dataclass
class Failure:
    """A case that is not as on one device.

    Attributes:
        case: The case.
        lines: What differs.
    """

    case: Case
    lines: list[str]

    @property
    def symptom(self) -> str:
        """What differs first, without numbers, by which failures are told apart."""
        first = self.lines[0].strip().splitlines()[-1]
        return f"{self.case.strategy}: " + re.sub(r"[\d.e+-]+|'.*?'|\[.*", "#", first)[:100]

    @property
    def size(self) -> int:
        """How much of the case is not the default."""
        return (
            sum(getattr(self.case, f.name) != f.default for f in fields(Case))
            + 2 * self.case.epochs
            + self.case.num_batches
        )


@dataclass
class Fuzzer:
    """Draws and runs cases.

    Attributes:
        pool: Processes for the ranks.
        machine: What they and the one device run on.
        shrink_seconds: For how long a failing case is made smaller.
        report: Called with a line about the progress.
        counts: How many cases ran, were refused, and failed.
        failures: The smallest failing case of each symptom.
        refusals: How often each message refused a case.
    """

    pool: Pool
    machine: Machine = ON_CPU
    shrink_seconds: float = 60.0
    report: Callable[[str], Any] = print
    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[str, Failure] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)
    _known: dict[Case, list[str]] = field(default_factory=dict)

    def run(
        self,
        *,
        first_seed: int,
        seconds: float,
        runs: int,
        strategies: tuple[str, ...] | None = None,
    ) -> None:
        """Runs rounds of cases until one of the limits is reached.

        Args:
            first_seed: Of the first round; later ones count on from it.
            seconds: For how long.
            runs: How many cases.
            strategies: Names of those to draw from.
        """
        end = time.monotonic() + seconds
        number = first_seed
        while time.monotonic() < end and self.counts["run"] < runs:
            self._round(number, end, runs, strategies)
            number += 1
            self.report(f"seed {number - 1}: {self}")

    def __str__(self) -> str:
        return (
            f"{self.counts['run']} cases, {self.counts['refused']} refused,"
            f" {self.counts['failed']} failed in {len(self.failures)} ways"
        )

    def _round(
        self, number: int, end: float, runs: int, strategies: tuple[str, ...] | None
    ) -> None:
        found_at: list[float] = []

        @seed(number)
        @settings(
            max_examples=CASES_PER_ROUND,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )
        @given(cases(strategies))
        def as_on_one_device(case: Case) -> None:
            if case not in self._known:
                is_over = time.monotonic() > end or self.counts["run"] >= runs
                is_small = found_at and time.monotonic() > found_at[0] + self.shrink_seconds
                if is_small or (is_over and not found_at):
                    return
                self._known[case] = self._differences(case)
            lines = self._known[case]
            if not lines:
                return
            failure = Failure(case, lines)
            known = self.failures.get(failure.symptom)
            if known is None:
                found_at.append(time.monotonic())
                self.report(f"FAILED {case!r}\n  {lines[0].strip()[-400:]}")
            elif not found_at:
                return  # seen in an earlier round
            if known is None or failure.size < known.size:
                self.failures[failure.symptom] = failure
            raise _DiffersError(failure.symptom)

        with suppress(_DiffersError, Flaky, ExceptionGroup):  # among the failures
            as_on_one_device()

    def _differences(self, case: Case) -> list[str]:
        self.counts["run"] += 1
        try:
            lines = find_differences(case, self.pool, self.machine)
        except RefusedError as error:
            self.counts["refused"] += 1
            self.refusals[str(error)[:160]] += 1
            return []
        self.counts["failed"] += bool(lines)
        return lines
