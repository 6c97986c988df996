"""Notes in a store that several ranks have."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from lightning_dist.engine.comms import store_notes
from lightning_dist.engine.comms.store_notes import RankNotes


def of_ranks(store: dist.Store, size: int) -> list[RankNotes]:
    return [RankNotes(store, "a run", rank, range(size)) for rank in range(size)]


def test_what_all_ranks_have_written_is_common() -> None:
    store = dist.HashStore()
    first, second, third = of_ranks(store, 3)
    first.leave(1, [2, 5, 7])
    assert first.common(1, [2, 5, 7]) == []
    second.leave(1, [5, 7])
    third.leave(1, [7, 2, 5])
    for notes, own in ((first, [2, 5, 7]), (second, [5, 7]), (third, [7, 2, 5])):
        assert notes.common(1, own) == [5, 7]
    assert first.common(2, [5]) == []


class CountingStore:
    """Counts the questions to a store."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        self.num_calls += 1
        return getattr(self._store, name)


@pytest.mark.parametrize("size", [2, 64])
def test_the_notes_of_all_ranks_are_two_questions(size: int) -> None:
    """All ranks ask at the same time, and the store answers one after the other."""
    store = dist.HashStore()
    for notes in of_ranks(store, size):
        notes.leave(1, [4])
    counting: Any = CountingStore(store)
    asking = RankNotes(counting, "a run", 0, range(size))
    assert asking.common(1, [4, 5]) == [4]
    assert counting.num_calls == 2


def test_only_the_newest_notes_are_kept() -> None:
    store = dist.HashStore()
    (notes,) = of_ranks(store, 1)
    for index in range(1, 6):
        notes.leave(index, [index])
    assert [notes.common(index, [index]) for index in range(1, 6)] == [[], [], [], [4], [5]]
    assert store.num_keys() == 2


class Clock:
    """Time that passes while somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def test_notes_that_do_not_come_are_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(store_notes, "time", clock)
    first, second = of_ranks(dist.HashStore(), 2)
    first.leave(1, [3])
    assert first.await_common(1, [3], 5.0) == []
    assert 5.0 <= clock.seconds < 5.1
    second.leave(1, [3])
    assert first.await_common(1, [3], 5.0) == [3]
    assert clock.seconds < 5.1
