"""Trainings in which something goes wrong end, or go on, and lose nothing."""

from __future__ import annotations

import threading

import pytest

from tests.faults.campaign import table_of
from tests.faults.case import ALL, LAUNCHER, Case, Fault, draw
from tests.faults.execution import Place, Result
from tests.faults.verdict import first_alarm
from tests.helpers.processes.forked_runs import WarmPython


@pytest.fixture(scope="session")
def place(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("faults")
    return Place(warm_python, folder, None, folder / "uninterrupted", threading.Lock())


ENDS = [
    Case("pipedream", faults=(Fault("SIGKILL", "save", 3, 0.01),), saves=1),
    Case("ddp", faults=(Fault("raise", "validation", 2, target=0),)),
    Case("pipedream", faults=(Fault("SIGTERM", "drain", 2, 0.002, target=0),)),
    Case("server", faults=(Fault("SIGKILL", "save", 3, 0.01),), saves=1),
    Case("1f1b", faults=(Fault("SIGUSR1", "validation", 2, 0.005),)),
    Case("fsdp", faults=(Fault("SIGKILL", "step", 8, 0.003, target=ALL),), saves=-1),
    Case("mesh", faults=(Fault("raise", "save", 4),)),
    Case("mesh", faults=(Fault("SIGKILL", "save", 3, 0.02),), saves=1, async_save=True),
    Case("tensor", faults=(Fault("SIGTERM", "step", 5, 0.001, target=LAUNCHER),)),
    Case(
        "pipedream_2bw", faults=(Fault("SIGKILL", "drain", 4, target=0), Fault("raise", "save", 3))
    ),
    Case("interleaved", launcher="script", faults=(Fault("SIGKILL", "step", 5, target=0),)),
    Case("1f1b 2x2", timeout_seconds=6.0, faults=(Fault("stopped for good", "step", 7, target=2),)),
]
GOES_ON = [
    Case("ddp", faults=(Fault("SIGSTOP", "step", 9, 0.002, lasts_seconds=0.5),)),
    Case("pipedream", faults=(Fault("SIGSTOP", "save", 2, 0.01, target=ALL, lasts_seconds=1.0),)),
]


@pytest.mark.long
@pytest.mark.parametrize("case", ENDS, ids=str)
def test_ends_with_the_cause_and_resumes_exactly(place: Place, case: Case) -> None:
    result = place.execute(case, "run")
    assert not result.problems, result
    assert result.outcome == "ended"


@pytest.mark.long
@pytest.mark.parametrize("case", GOES_ON, ids=str)
def test_goes_on_exactly(place: Place, case: Case) -> None:
    result = place.execute(case, "run")
    assert not result.problems, result
    assert result.outcome == "on"


def test_a_case_follows_from_its_number() -> None:
    cases = [draw(3, number) for number in range(200)]
    assert cases == [draw(3, number) for number in range(200)]
    assert cases != [draw(4, number) for number in range(200)]
    assert len(set(cases)) == 200


def test_the_first_alarm() -> None:
    quiet = "Trainer.fit stopped: max_epochs=3 reached.\nno Error: here"
    lost = "[rank 0] Rank 1 failed first: the process of rank 1 was lost"
    assert first_alarm(f"{quiet}\n") == ""
    assert first_alarm(f"{quiet}\n{lost}\nRuntimeError: something") == lost
    assert first_alarm(f"  File x\nKeyError: 'mistake'\n{lost}") == "KeyError: 'mistake'"


def test_the_table_counts_what_held() -> None:
    results = {
        0: Result("a", [("SIGKILL", "step")], problems=["cause: RuntimeError", "cause: again"]),
        1: Result("b", [("SIGKILL", "step")], "on"),
        2: Result("c", [("raise", "save"), ("SIGTERM", "save")]),
        3: Result("d", outcome="late"),
    }
    table = table_of(results)
    cells = [list(column.cells) for column in table.columns]
    assert table.title == "4 runs, 1 without"
    assert cells[0] == ["SIGKILL", "two faults"]
    assert cells[2] == ["2", "1"]
    assert cells[3] == ["1", "1"]
    assert cells[list(column.header for column in table.columns).index("cause")] == ["1", "1"]
