from __future__ import annotations

import threading

from lightning_dist.doctor.check import Check, NoFacts, Run, worst_of
from lightning_dist.doctor.report import Result, Status, fail, ok, warn
from tests.unit.doctor.facts import TWO_HOSTS

FINE, ODD, BROKEN = ok("fine"), warn("odd", "look"), fail("broken", "mend")


def test_the_worst_result_counts_and_names_its_ranks() -> None:
    assert worst_of(TWO_HOSTS, dict.fromkeys(range(4), FINE)) == FINE
    result = worst_of(TWO_HOSTS, {0: ODD, 1: FINE, 2: BROKEN, 3: BROKEN})
    assert result == fail("b (ranks 2, 3): broken", "mend")
    assert worst_of(TWO_HOSTS, dict.fromkeys(range(4), ODD)) == ODD  # of all, so no rank is named


def test_a_probe_that_raises_is_a_failure_with_its_rank() -> None:
    def probe(run: Run) -> Result:
        raise OSError("no such thing")

    it = Check("it", probe, worst_of, "try this")
    answer = it.attempt(TWO_HOSTS)
    assert answer == NoFacts("OSError: no such thing")
    result = it.conclude(TWO_HOSTS, {0: FINE, 1: FINE, 2: answer, 3: FINE})
    assert result == fail("b (rank 2): OSError: no such thing", "try this")


def test_a_probe_that_hangs_is_a_failure() -> None:
    never = threading.Event()

    def probe(run: Run) -> Result:
        never.wait(20)
        return FINE

    it = Check("it", probe, worst_of, "try this", seconds=0.02)
    result = it.conclude(TWO_HOSTS, {0: it.attempt(TWO_HOSTS)})
    never.set()
    assert (result.status, result.remedy) == (Status.FAIL, "try this")
    assert "not done within 0.02 s" in result.found
