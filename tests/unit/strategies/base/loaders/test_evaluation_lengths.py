"""Ranks gather the lengths of their loaders once, and know which batches all of them have."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.trainer.states import TrainerFn

from lightning_dist.strategies.base.loaders import lengths
from lightning_dist.strategies.base.loaders.lengths import EvaluationLengths


@pytest.mark.parametrize(
    ("of_ranks", "all_have"),
    [
        ([[2], [2]], [[True, True, False]]),
        ([[1], [2]], [[True, False, False]]),
        ([[2, 1], [1, 3]], [[True, False, False], [True, False, False]]),
        ([[2], [math.inf]], [[False, False, False]]),
        ([[math.inf], [math.inf]], [[False, False, False]]),
    ],
)
def test_batches_that_all_ranks_have(
    monkeypatch: pytest.MonkeyPatch,
    of_ranks: list[list[int | float]],
    all_have: list[list[bool]],
) -> None:
    monkeypatch.setattr(lengths, "gather_objects", lambda *_: [(own, False) for own in of_ranks])
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(fn=TrainerFn.VALIDATING),
        validate_loop=object(),
        val_dataloaders=None,
        num_val_batches=of_ranks[0],
    )
    everyone: Any = object
    told = EvaluationLengths(trainer, everyone, [[0], [1]], None, runs_whole_steps=True)
    told._compare()
    loaders = range(len(of_ranks[0]))
    assert [[told.all_have(batch, loader) for batch in range(3)] for loader in loaders] == all_have
