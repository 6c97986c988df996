"""Samplers and loader hooks draw alike on all ranks, whatever else these draw by themselves."""

from __future__ import annotations

import gc
import os
import random
import warnings
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, random_split

from lightning_dist import DDPStrategy, FSDPStrategy
from tests.helpers.networks.models import make_loader, make_module, make_trainer
from tests.helpers.processes.workers import WorkerPool
from tests.integration.ddp.test_random_numbers import NUM_SAMPLES, Augmented, Drawing

STRATEGIES = {"ddp": DDPStrategy, "fsdp": FSDPStrategy}


class Halves(Sampler[int]):
    """Every second index of a permutation that this rank draws itself."""

    def __init__(self, source: str) -> None:
        self.source = source

    def order(self) -> list[int]:
        if self.source == "torch":
            return torch.randperm(NUM_SAMPLES).tolist()
        if self.source == "numpy":
            return np.random.permutation(NUM_SAMPLES).tolist()
        return random.sample(range(NUM_SAMPLES), NUM_SAMPLES)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order()[int(os.environ["RANK"]) :: 2])

    def __len__(self) -> int:
        return NUM_SAMPLES // 2


class OneByOne(Halves):
    """Draws while it is read: an index is this rank's by the toss of a coin."""

    def __iter__(self) -> Iterator[int]:
        rank = int(os.environ["RANK"])
        for first in range(0, NUM_SAMPLES, 2):
            yield first + (int(torch.randint(2, ())) + rank) % 2


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        data = Augmented()
        return map(data.__getitem__, Halves("torch"))


class Generator(IterableDataset[Any]):
    """Shuffles when it is asked for its first sample."""

    def __iter__(self) -> Iterator[Any]:
        for index in Halves("numpy"):
            yield Augmented()[index]


class Buffer(IterableDataset[Any]):
    """Shuffles as it is read, draws for each sample, and shares out what comes."""

    def __iter__(self) -> Iterator[Any]:
        buffer = list(range(4))
        for place in range(NUM_SAMPLES):
            index = buffer.pop(random.randrange(len(buffer)))
            buffer += [place + 4] if place + 4 < NUM_SAMPLES else []
            sample = Augmented()[index]
            if place % 2 == int(os.environ["RANK"]):
                yield sample


STREAMS = {"stream": Stream, "generator": Generator, "buffer": Buffer}


def split_by_rank() -> Any:
    return random_split(Augmented(), [NUM_SAMPLES // 2] * 2)[int(os.environ["RANK"])]


class WithHooks(Drawing):
    """Splits the data in the hooks, and in each epoch anew."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[list[int]] = []

    def train_dataloader(self) -> DataLoader:
        return DataLoader(split_by_rank(), batch_size=4, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(split_by_rank(), batch_size=4)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(batch[0].tolist())
        torch.rand(1 + int(os.environ["RANK"]))


def train(strategy: str, module: type[Drawing], loaders: Any = (), **kwargs: Any) -> Any:
    built = make_module(module)
    L.seed_everything(1, verbose=False)
    trainer = make_trainer(
        devices=2,
        strategy=STRATEGIES[strategy](save_full=True),
        num_sanity_val_steps=0,
        **{"max_epochs": 2, **kwargs.pop("options", {})},
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*persistent_workers=True.*")
        trainer.fit(built, *loaders, ckpt_path=kwargs.get("resume"), weights_only=True)
    if "save" in kwargs:
        trainer.save_checkpoint(kwargs["save"])
    noise = torch.stack(built.noise)
    return built.indices, noise, getattr(built, "validated", None), float(torch.rand(()))


def fit(strategy: str, kind: str, num_workers: int, extra: dict[str, Any]) -> Any:
    start = {"num_workers": num_workers}
    if num_workers:
        start["multiprocessing_context"] = "fork"
    if kind == "batches":
        sampler = BatchSampler(Halves("torch"), 4, drop_last=False)
        loader = DataLoader(Augmented(), batch_sampler=sampler, **start)
    elif kind in STREAMS:
        loader = DataLoader(STREAMS[kind](), batch_size=4, **start)
    elif kind == "one by one":
        loader = DataLoader(Augmented(), 4, sampler=OneByOne("torch"), **start)
    else:
        loader = DataLoader(Augmented(), 4, sampler=Halves(kind), **start)
    own, collate = loader.batch_sampler, loader.collate_fn
    result = train(strategy, Drawing, (loader, make_loader(8)), **extra)
    assert loader.batch_sampler is own
    assert loader.collate_fn is collate
    return result


def fit_shuffled() -> Any:
    loader = DataLoader(Augmented(), 4, shuffle=True)
    return train("ddp", Drawing, (loader, make_loader(8)))


class WithNewLoaders(WithHooks):
    """Counts the training data that there are still when a loader of others is made."""

    def __init__(self) -> None:
        super().__init__()
        self.data: WeakSet[Any] = WeakSet()
        self.counts: list[int] = []

    def train_dataloader(self) -> DataLoader:
        gc.collect()
        self.counts.append(len(self.data))
        loader = super().train_dataloader()
        self.data.add(loader.dataset)
        return loader


def count_data(num_epochs: int) -> list[int]:
    module = make_module(WithNewLoaders)
    trainer = make_trainer(
        devices=2,
        strategy=DDPStrategy(),
        max_epochs=num_epochs,
        limit_val_batches=0,
        reload_dataloaders_every_n_epochs=1,
    )
    trainer.fit(module)
    return module.counts


def test_data_of_past_epochs_are_let_go_of(workers: WorkerPool) -> None:
    for counts in workers.run(2, count_data, 5):
        assert len(counts) == 5
        assert max(counts) <= 1  # the trainer's own, until it has got the next one


def fit_with_hooks(strategy: str) -> Any:
    return train(strategy, WithHooks, options={"reload_dataloaders_every_n_epochs": 1})


def flat(batches: list[list[int]]) -> list[int]:
    return [i for batch in batches for i in batch]


@pytest.mark.some("ddp-python-0")
@pytest.mark.parametrize(
    ("strategy", "kind", "num_workers"),
    [
        ("ddp", "torch", 0),
        ("ddp", "torch", 1),
        ("fsdp", "torch", 0),
        ("ddp", "numpy", 0),
        ("ddp", "python", 0),
        ("ddp", "one by one", 0),
        ("ddp", "one by one", 1),
        ("ddp", "batches", 0),
        ("ddp", "stream", 0),
        ("ddp", "stream", 1),
        ("fsdp", "generator", 0),
        ("ddp", "generator", 1),
        ("ddp", "buffer", 0),
    ],
)
def test_samplers_share_out_what_they_shuffle(
    workers: WorkerPool, strategy: str, kind: str, num_workers: int, tmp_path: Any
) -> None:
    whole = workers.run(2, fit, strategy, kind, num_workers, {})
    (first, noise, _, after), (second, other, _, other_after) = whole
    orders = []
    for epoch in (slice(0, 3), slice(3, 6)):
        seen = flat(first[epoch] + second[epoch])
        assert sorted(seen) == list(range(NUM_SAMPLES))
        orders.append(seen)
    assert orders[0] != orders[1]
    if kind in ("stream", "generator"):  # who could tell the order from the augmentation?
        assert torch.equal(noise, other)
    every_noise = torch.cat([noise, other]).unique()
    assert len(every_noise) == noise.numel() * (1 if torch.equal(noise, other) else 2)
    assert after == other_after

    path = str(tmp_path / "middle.ckpt")
    workers.run(2, fit, strategy, kind, num_workers, {"options": {"max_epochs": 1}, "save": path})
    resumed = workers.run(2, fit, strategy, kind, num_workers, {"resume": path})
    for (indices, noise, *_), (again, same, *_) in zip(whole, resumed, strict=True):
        assert again == indices[3:]
        assert torch.equal(same, noise[3:])


def test_torchs_sampler_shuffles_alike_as_under_lightnings_own_strategy(
    workers: WorkerPool,
) -> None:
    (first, noise, *_), (second, other, *_) = workers.run(2, fit_shuffled)
    assert first == second
    assert not torch.isclose(noise, other).any()


@pytest.mark.some("ddp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_hooks_split_the_data_alike(workers: WorkerPool, strategy: str) -> None:
    (first, _, held_out, _), (second, _, others, _) = workers.run(2, fit_with_hooks, strategy)
    for one, other in ((first, second), (held_out, others)):
        splits = []
        for epoch in (slice(0, 3), slice(3, 6)):
            assert sorted(flat(one[epoch] + other[epoch])) == list(range(NUM_SAMPLES))
            splits.append(sorted(flat(one[epoch])))
        assert splits[0] != splits[1]
