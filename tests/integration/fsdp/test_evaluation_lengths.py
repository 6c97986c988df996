"""Ranks that compute each forward together have as many batches to evaluate."""

from __future__ import annotations

import os
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from lightning_dist import FSDPStrategy
from tests.helpers.networks.models import (
    Classifier,
    make_data,
    make_loader,
    make_module,
    make_trainer,
)
from tests.helpers.processes.workers import WorkerPool


class ManyLoaders(Classifier):
    """Takes several loaders, and lets one rank have none of a loader's batches."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from make_data(16)


def attempt(fn: str, lengths: list[list[int]], strategy: Any, options: Any) -> tuple[str, int]:
    """Gives the message of the error, if any, and the steps trained before it."""
    own = lengths[int(os.environ["RANK"])]
    loaders: Any = [make_loader(8 * length) for length in own]
    if not own:
        loaders = DataLoader(Stream(), batch_size=8)
    trainer = make_trainer(devices=len(lengths), strategy=FSDPStrategy(**strategy), **options)
    module = make_module(ManyLoaders)
    try:
        if fn == "fit":
            trainer.fit(module, make_loader(16), loaders)
        else:
            getattr(trainer, fn)(module, loaders)
    except ValueError as error:
        return str(error), trainer.global_step
    return "", trainer.global_step


@pytest.mark.parametrize(
    ("fn", "lengths", "message", "options"),
    [
        ("fit", [[1], [2]], "have [1, 2] batches to validate", {}),
        ("fit", [[1], [2]], "have [1, 2] batches to validate", {"num_sanity_val_steps": 0}),
        ("fit", [[1], [2]], "have [1, 2] batches to validate", {"num_sanity_val_steps": 1}),
        ("validate", [[1], [2]], "`limit_val_batches`", {}),
        ("validate", [[1, 2], [1, 3]], "have [[1, 2], [1, 3]] batches to validate", {}),
        ("validate", [[1], [0]], "have [1, 0] batches to validate", {}),
        ("test", [[1], [2]], "`limit_test_batches`", {}),
        ("predict", [[1], [2]], "`limit_predict_batches`", {}),
    ],
)
def test_other_lengths_are_refused_before_the_evaluation(
    workers: WorkerPool, fn: str, lengths: list[list[int]], message: str, options: dict[str, Any]
) -> None:
    for text, steps in workers.run(2, attempt, fn, lengths, {}, options):
        assert message in text
        assert steps == 0


@pytest.mark.some("replicas*-fit", "of unknown length-validate")
@pytest.mark.parametrize("fn", ["fit", "validate"])
@pytest.mark.parametrize(
    ("lengths", "strategy", "options"),
    [
        ([[2], [3]], {}, {"limit_val_batches": 2}),
        ([[], []], {}, {}),
        ([[1], [2]], {"shard_size": 1}, {}),
        ([[1], [1], [2], [2]], {"shard_size": 2}, {}),
    ],
    ids=["limited", "of unknown length", "replicas", "replicas of shards"],
)
def test_others_run(
    workers: WorkerPool,
    fn: str,
    lengths: list[list[int]],
    strategy: dict[str, Any],
    options: dict[str, Any],
) -> None:
    answers = workers.run(len(lengths), attempt, fn, lengths, strategy, options)
    assert answers == [("", 2 if fn == "fit" else 0)] * len(lengths)


def test_replicas_that_evaluate_more_go_on_training_with_the_others(workers: WorkerPool) -> None:
    options = {"max_epochs": 5}
    answers = workers.run(2, attempt, "fit", [[1], [3]], {"shard_size": 1}, options, timeout=25)
    assert answers == [("", 10)] * 2
