"""Ranks whose epochs would end at different batches learn it at a batch that all of them have."""

from __future__ import annotations

import os
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from lightning_dist import DDPStrategy, FSDPStrategy
from tests.helpers.models import Classifier, make_data, make_loader, make_module, make_trainer
from tests.helpers.workers import WorkerPool


class Ending(IterableDataset[Any]):
    """Ends earlier on one rank, and does not say when."""

    def __iter__(self) -> Any:
        return iter(make_data(16 - 8 * int(os.environ["RANK"])))


def end_apart(limit: int | None) -> list[str]:
    messages = []
    for strategy in (DDPStrategy(), FSDPStrategy()):
        trainer = make_trainer(devices=2, strategy=strategy, limit_train_batches=limit)
        try:
            trainer.fit(make_module(), DataLoader(Ending(), batch_size=4), make_loader(8))
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_streams_that_end_apart(workers: WorkerPool) -> None:
    for messages in workers.run(2, end_apart, None):
        assert len(messages) == 2
        assert all("ranks [1] (of 2) have ended after 2 batches" in text for text in messages)
    assert workers.run(2, end_apart, 2) == [[], []]


class Shrinking(Classifier):
    """Has fewer batches in the second epoch, on one rank."""

    def train_dataloader(self) -> Any:
        return make_loader(16 - 8 * self.current_epoch * int(os.environ["RANK"]))


def reload() -> str:
    trainer = make_trainer(
        devices=2, strategy=DDPStrategy(), max_epochs=2, reload_dataloaders_every_n_epochs=1
    )
    with pytest.raises(ValueError, match="training batches") as caught:
        trainer.fit(make_module(Shrinking), val_dataloaders=make_loader(8))
    return str(caught.value)


def test_reloaded_data_is_compared_too(workers: WorkerPool) -> None:
    assert all("have [2, 1] training batches" in text for text in workers.run(2, reload))
