"""Ranks that compute each forward together have as many batches to evaluate."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, IterableDataset

from lightning_dist import DDPStrategy, FSDPStrategy
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


class LogsSteps(Classifier):
    """Combines a value of all ranks in each step."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.model(batch[0]).sum()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)


class Stream(IterableDataset[Any]):
    def __init__(self, num_samples: int = 16) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Any:
        yield from make_data(self.num_samples)


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


@pytest.mark.some("of unknown length-validate")
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


class Terminated(Classifier):
    """Is asked to stop in its first step of four."""

    num_steps = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.num_steps += 1
        if self.num_steps == 1:
            signal.raise_signal(signal.SIGTERM)


def validate_a_stream() -> int:
    module = make_module(Terminated)
    trainer = make_trainer(devices=1, strategy=DDPStrategy())
    with suppress(SIGTERMException):
        trainer.validate(module, DataLoader(Stream(), batch_size=4), verbose=False)
    return module.num_steps


def test_a_rank_alone_stops_inside_of_a_stream(workers: WorkerPool) -> None:
    assert workers.run(1, validate_a_stream) == [2]  # the ranks agree in the next step


def test_replicas_that_evaluate_more_go_on_training_with_the_others(workers: WorkerPool) -> None:
    options = {"max_epochs": 5}
    answers = workers.run(2, attempt, "fit", [[1], [3]], {"shard_size": 1}, options, timeout=25)
    assert answers == [("", 10)] * 2


def attempt_streams(fn: str, lengths: list[int], strategy: Any, module: Any, options: Any) -> str:
    stream = Stream(8 * lengths[int(os.environ["RANK"])])
    trainer = make_trainer(devices=len(lengths), strategy=strategy, **options)
    try:
        loaders = DataLoader(stream, batch_size=8)
        if fn == "fit":
            trainer.fit(make_module(module), make_loader(16), loaders)
        else:
            getattr(trainer, fn)(make_module(module), loaders)
    except ValueError as error:
        return str(error)
    return ""


SHARDS, REPLICAS = FSDPStrategy(timeout_s=20.0), DDPStrategy(timeout_s=20.0)


@pytest.mark.parametrize(
    ("fn", "lengths", "strategy", "module", "message", "options"),
    [
        ("fit", [2, 3], SHARDS, Classifier, "ranks [0] (of [0, 1]) have ended after 2 batches", {}),
        ("fit", [2, 3], SHARDS, Classifier, "", {"limit_val_batches": 2}),
        ("fit", [3, 2], SHARDS, Classifier, "after 2 batches", {"num_sanity_val_steps": 2}),
        ("fit", [1, 3], SHARDS, Classifier, "after 1 batches", {"limit_val_batches": 2}),
        ("fit", [1, 3], SHARDS, Classifier, "after 1 batches", {"num_sanity_val_steps": 2}),
        ("fit", [0, 3], SHARDS, Classifier, "after 0 batches", {"num_sanity_val_steps": 1}),
        ("validate", [0, 1], SHARDS, Classifier, "have ended after 0 batches to validate", {}),
        (
            "predict",
            [2, 1],
            SHARDS,
            Classifier,
            "ranks [1] (of [0, 1]) have ended after 1 batch",
            {},
        ),
        ("fit", [1, 2], REPLICAS, Classifier, "", {}),
        ("fit", [2, 2], REPLICAS, LogsSteps, "", {}),
        ("fit", [1, 3], REPLICAS, LogsSteps, "have ended after 1 batches to validate", {}),
        ("validate", [3, 2], REPLICAS, LogsSteps, "have ended after 2 batches to validate", {}),
    ],
)
def test_streams_that_end_before_others_are_refused(
    workers: WorkerPool,
    fn: str,
    lengths: list[int],
    strategy: Any,
    module: Any,
    message: str,
    options: dict[str, Any],
) -> None:
    for text in workers.run(2, attempt_streams, fn, lengths, strategy, module, options):
        assert message in text
        assert bool(message) == bool(text)


def attempt_steps(lengths: list[int], options: Any) -> str:
    trainer = make_trainer(devices=2, strategy=DDPStrategy(timeout_s=20.0), **options)
    loader = make_loader(8 * lengths[int(os.environ["RANK"])])
    try:
        trainer.fit(make_module(LogsSteps), make_loader(16), loader)
    except ValueError as error:
        return str(error)
    return ""


def test_replicas_that_combine_a_value_in_steps_have_as_many(workers: WorkerPool) -> None:
    for text in workers.run(2, attempt_steps, [2, 3], {}):
        assert "have [2, 3] batches to validate, and combine a value in each step" in text
    assert workers.run(2, attempt_steps, [2, 3], {"limit_val_batches": 2}) == ["", ""]
