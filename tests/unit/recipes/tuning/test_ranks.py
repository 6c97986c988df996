"""What a rank makes of the end of its training; tests/integration/test_tune.py has real ones."""

from __future__ import annotations

from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from recipes.tuning.outcome import Outcome, Report
from recipes.tuning.ranks import Ranks, _watch


def watch(*messages: Any, exit_code: int = 1, other_failed: bool = False) -> tuple[Outcome, Any]:
    near, far = Pipe()
    store = HashStore()
    for message in messages:
        far.send(message)
    if other_failed:
        store.set("failed", "")
    elif not messages or isinstance(messages[-1], Report):
        far.close()  # the process has died
    process = SimpleNamespace(exitcode=exit_code, join=lambda: None)
    seen: list[Report] = []

    def report(report: Report) -> bool:
        seen.append(report)
        return True

    store_of_ranks: Any = store
    return _watch(near, process, store_of_ranks, report), seen


def test_an_outcome_ends_the_wait() -> None:
    complete = Outcome("complete", {"loss": 1.0}, 3)
    assert watch(complete) == (complete, [])
    assert watch(Report(2.0, 0), complete) == (complete, [Report(2.0, 0)])
    outcome, seen = watch(Report(2.0, 0))  # it dies before it has the answer
    assert (outcome.state, seen) == ("failed", [Report(2.0, 0)])


def test_a_process_that_is_killed_has_failed() -> None:
    outcome, _ = watch(exit_code=-9)
    assert (outcome.state, outcome.error[:22]) == ("failed", "The process was killed")
    outcome, _ = watch(exit_code=3)
    assert outcome.error == "The process ended with exit code 3."


def test_another_rank_that_has_failed_ends_the_wait() -> None:
    assert watch(other_failed=True)[0] == Outcome("failed")


def test_without_a_launcher_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    ranks = Ranks()
    assert (ranks.is_first, ranks.size) == (True, 1)
    assert ranks.decide(lambda: 5) == 5

    def fail() -> None:
        raise ValueError("no study")

    with pytest.raises(ValueError, match="no study"):
        ranks.decide(fail)
    ranks.close()
