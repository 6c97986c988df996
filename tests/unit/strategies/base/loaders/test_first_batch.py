"""A batch that is read ahead of a run is no loss to it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from lightning_dist.engine.tensors.samples import SampleList
from lightning_dist.strategies.base.loaders.first_batch import (
    BegunLoaders,
    ResumedLoader,
    read_first_batch,
)


class Drawing(Dataset[float]):
    """Augments with generators of its own."""

    def __init__(self) -> None:
        self.numpy = np.random.default_rng(0)
        self.old = np.random.RandomState(0)
        self.python = random.Random(0)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> float:
        return index + self.numpy.random() + self.old.rand() + self.python.random()


class Stream(IterableDataset[int]):
    """Is there once."""

    def __init__(self) -> None:
        self.numbers = iter(range(6))

    def __iter__(self) -> Iterator[int]:
        yield from self.numbers


def make_drawing() -> DataLoader[float]:
    data = Drawing()
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(1))
    return DataLoader(data, batch_size=2, sampler=sampler)


def read(loader: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]


@pytest.mark.parametrize(
    "make",
    [
        make_drawing,
        lambda: [1, 2, 3],
        lambda: iter([1, 2, 3]),
        lambda: (number for number in range(3)),
        lambda: DataLoader(Stream(), batch_size=2),
    ],
)
def test_a_loader_gives_the_same_as_if_it_had_not_been_read(make: Callable[[], Any]) -> None:
    expected = read(make())
    loader, begun = make(), BegunLoaders()
    (first,) = read(begun.first_of(loader))
    assert first == expected[0]
    assert read(begun.resume(loader)) == expected


def test_only_the_first_epoch_goes_on() -> None:
    class Endless:
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    loader, begun = Endless(), BegunLoaders()
    list(begun.first_of(loader))
    resumed = begun.resume(loader)
    assert isinstance(resumed, ResumedLoader)
    assert read(resumed) == read(resumed) == [0, 1, 2]
    assert begun.resume(loader) is loader


def test_another_loader_of_the_same_stream_goes_on_too() -> None:
    stream, begun = Stream(), BegunLoaders()
    list(begun.first_of(DataLoader(stream, batch_size=2)))
    resumed: Any = begun.resume(DataLoader(stream, batch_size=2))
    assert read(resumed) == [[0, 1], [2, 3], [4, 5]]
    assert resumed.batch_size == 2
    with pytest.raises(TypeError):
        len(resumed)


def test_a_state_that_is_loaded_counts() -> None:
    class Stateful:
        def __init__(self) -> None:
            self.next = 0

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.next, 5))

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.next = state["next"]

    loader, begun = Stateful(), BegunLoaders()
    list(begun.first_of(loader))
    resumed: Any = begun.resume(loader)
    resumed.load_state_dict({"next": 3})
    assert read(resumed) == [3, 4]


def test_workers_that_persist_are_not_kept() -> None:
    loader = DataLoader(Drawing(), batch_size=2, num_workers=1, persistent_workers=True)
    list(BegunLoaders().first_of(loader))
    assert loader._iterator is None


@pytest.mark.parametrize(
    ("fn", "loaders", "batch", "count"),
    [
        (TrainerFn.FITTING, [1, 2], 1, 1),
        (TrainerFn.FITTING, {"a": [1, 2], "b": [3]}, {"a": 1, "b": 3}, 2),
        (TrainerFn.FITTING, CombinedLoader([[1, 2], [3]], "min_size"), [1, 3], 2),
        (TrainerFn.TESTING, [[1, 2], [3]], 1, 2),
        (TrainerFn.PREDICTING, [[], [3]], 3, 2),
    ],
)
def test_reads_what_the_loop_would(fn: TrainerFn, loaders: Any, batch: Any, count: int) -> None:
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    loops: dict[TrainerFn, Any] = {
        TrainerFn.FITTING: trainer.fit_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    loops[fn]._data_source.instance = loaders
    trainer.state.fn = fn
    assert read_first_batch(trainer, BegunLoaders()) == (batch, count)


def test_loaders_that_are_read_one_after_the_other_are_not_begun() -> None:
    class Unread:
        def __iter__(self) -> Iterator[int]:
            raise AssertionError

    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.state.fn = TrainerFn.TESTING
    trainer.test_loop._data_source.instance = [[1, 2], Unread()]
    assert read_first_batch(trainer, BegunLoaders()) == (1, 2)


def test_a_list_of_samples_is_known_by_its_own_loader() -> None:
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    samples: Any = [torch.ones(5)] * 8
    loaders = {"a": DataLoader(samples, batch_size=4, collate_fn=list), "b": [1]}
    trainer.test_loop._data_source.instance = loaders
    trainer.state.fn = TrainerFn.TESTING
    evaluated: Any = read_first_batch(trainer, BegunLoaders())
    assert isinstance(evaluated[0], SampleList)
    trainer.fit_loop._data_source.instance = loaders
    trainer.state.fn = TrainerFn.FITTING
    trained: Any = read_first_batch(trainer, BegunLoaders())
    assert isinstance(trained[0]["a"], SampleList)


def test_there_may_be_none() -> None:
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.state.fn = TrainerFn.FITTING
    trainer.fit_loop._data_source.instance = []
    assert read_first_batch(trainer, BegunLoaders()) is None
    trainer.fit_loop._data_source.instance = L.LightningModule()
    assert read_first_batch(trainer, BegunLoaders()) is None
