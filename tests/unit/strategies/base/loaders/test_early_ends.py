"""A rank whose loader has told a wrong length finds out whether it is alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_dist.engine.comms.store_notes import RankNotes
from lightning_dist.strategies.base.loaders import lengths
from lightning_dist.strategies.base.loaders.lengths import TrainingLengths


def of_ranks() -> list[TrainingLengths]:
    store = dist.HashStore()
    notes = [RankNotes(store, "a run", rank, range(2)) for rank in range(2)]
    unused: Any = None
    return [TrainingLengths(own, unused) for own in notes]


def reading(monkeypatch: pytest.MonkeyPatch, *answer: Any) -> Any:
    monkeypatch.setattr(lengths, "batches_read", lambda _: answer)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(TrainingLengths, "grace_seconds", 0.0)
    return SimpleNamespace(current_epoch=4)


@pytest.mark.parametrize(
    "answer", [(6, 6, True), (3, None, True), (3, 6, False)], ids=["whole", "unknown", "skipped"]
)
def test_other_ends_are_nobodys_business(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    of_ranks()[0].end_epoch(reading(monkeypatch, *answer))


def test_a_rank_that_ends_early_alone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = of_ranks()
    text = "loader of rank 1 says that it has 6 batches and has ended after 3"
    with pytest.raises(ValueError, match=text):
        first.end_epoch(reading(monkeypatch, 3, 6, True))
    second.end_epoch(reading(monkeypatch, 3, 6, True))  # finds the note of the first
