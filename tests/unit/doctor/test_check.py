from __future__ import annotations

import threading

from lightning_dist.doctor.check import Check, NoFacts, Run, each
from lightning_dist.doctor.result import Result, Status, fail, ok, warn
from tests.unit.doctor.facts import TWO_HOSTS


def judge(run: Run, number: int) -> Result:
    return (ok("fine"), warn("odd", "look"), fail("broken", "mend"))[number]


def test_the_worst_result_counts_and_names_its_ranks() -> None:
    both = each(judge)
    assert both(TWO_HOSTS, dict.fromkeys(range(4), 0)) == ok("fine")
    result = both(TWO_HOSTS, {0: 1, 1: 0, 2: 2, 3: 2})
    assert result == fail("b (ranks 2, 3): broken", "mend")


def test_a_probe_that_raises_is_a_failure_with_its_rank() -> None:
    def probe(run: Run) -> int:
        raise OSError("no such thing")

    it = Check("it", probe, each(judge), "try this")
    answer = it.attempt(TWO_HOSTS)
    assert answer == NoFacts("OSError: no such thing")
    result = it.conclude(TWO_HOSTS, {0: 0, 1: 0, 2: answer, 3: 0})
    assert result == fail("b (rank 2): OSError: no such thing", "try this")


def test_a_probe_that_hangs_is_a_failure() -> None:
    never = threading.Event()

    def probe(run: Run) -> int:
        never.wait(20)
        return 0

    it = Check("it", probe, each(judge), "try this", seconds=0.02)
    result = it.conclude(TWO_HOSTS, {0: it.attempt(TWO_HOSTS)})
    never.set()
    assert (result.status, result.remedy) == (Status.FAIL, "try this")
    assert "not done within 0.02 s" in result.found


def test_a_probe_in_the_main_thread_leaves_no_alarm_behind() -> None:
    it = Check("it", lambda run: 0, each(judge), "", seconds=0.01, in_main_thread=True)
    assert it.attempt(TWO_HOSTS) == 0
    threading.Event().wait(0.03)  # faulthandler would have ended this process
