"""Notes in a store that several ranks have."""

from __future__ import annotations

import time

import torch.distributed as dist

from lightning_dist.strategies.rank_notes import RankNotes


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


def test_only_the_newest_notes_are_kept() -> None:
    store = dist.HashStore()
    (notes,) = of_ranks(store, 1)
    for index in range(1, 6):
        notes.leave(index, [index])
    assert [notes.common(index, [index]) for index in range(1, 6)] == [[], [], [], [4], [5]]
    assert store.num_keys() == 2


def test_notes_that_do_not_come_are_not_waited_for_for_ever() -> None:
    first, second = of_ranks(dist.HashStore(), 2)
    first.leave(1, [3])
    start = time.monotonic()
    assert first.await_common(1, [3], 0.05) == []
    assert 0.05 < time.monotonic() - start < 1
    second.leave(1, [3])
    assert first.await_common(1, [3], 60) == [3]
