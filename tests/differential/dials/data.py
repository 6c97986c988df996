"""The loaders that a case may name; replicas read equal shares of each global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from tests.differential.case import Case
from tests.differential.dials.models import CLASSES, FEATURES, OF_TOKENS, TOKENS


@dataclass
class Samples:
    """A batch as a dataclass."""

    x: Tensor
    y: Tensor
    names: list[str]


class Pair(NamedTuple):
    """A batch as a named tuple."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Place:
    """Which share of the data a process reads.

    Attributes:
        num_replicas: Number of shares.
        rank: Number of this one.
    """

    num_replicas: int = 1
    rank: int = 0


class ShareOf(Sampler[int]):
    """Takes each n-th of another sampler's indices."""

    def __init__(self, sampler: Sampler[int], place: Place) -> None:
        self._sampler = sampler
        self._place = place

    def __iter__(self) -> Iterator[int]:
        for position, index in enumerate(self._sampler):
            if position % self._place.num_replicas == self._place.rank:
                yield index

    def __len__(self) -> int:
        return len(self._sampler) // self._place.num_replicas  # type: ignore[arg-type]


class Stream(IterableDataset[Any]):
    """Yields samples, and has no length."""

    def __init__(self, samples: Dataset[Any], num_samples: int, place: Place) -> None:
        self._samples = samples
        self._own = range(place.rank, num_samples, place.num_replicas)

    def __iter__(self) -> Iterator[Any]:
        for index in self._own:
            yield self._samples[index]


class Augmented(Dataset[Any]):
    """Adds noise from the process's own generator."""

    def __init__(self, samples: TensorDataset) -> None:
        self._samples = samples

    def __getitem__(self, index: int) -> Any:
        x, y = self._samples[index]
        return x + 0.1 * torch.rand((), dtype=x.dtype), y

    def __len__(self) -> int:
        return len(self._samples)


def samples_of(case: Case, num_samples: int, seed: int) -> TensorDataset:
    """Draws inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    if case.model in OF_TOKENS:
        tokens = torch.randint(0, TOKENS, (num_samples, 5), generator=generator)
        return TensorDataset(tokens, tokens[:, 0].clone())
    x = torch.randn(num_samples, FEATURES, generator=generator, dtype=torch.float64)
    if case.precision != "double":
        x = x.float()
    return TensorDataset(x, torch.randint(0, CLASSES, (num_samples,), generator=generator))


def _as_dict(samples: list[Any]) -> dict[str, Any]:
    return {
        "x": torch.stack([x for x, _ in samples]),
        "y": torch.stack([y for _, y in samples]),
        "name": [f"sample {int(y)}" for _, y in samples],
        "scale": 1.0,
    }


def _as_dataclass(samples: list[Any]) -> Samples:
    given = _as_dict(samples)
    return Samples(given["x"], given["y"], given["name"])


def _as_named(samples: list[Any]) -> Pair:
    given = _as_dict(samples)
    return Pair(given["x"], given["y"])


def _as_list(samples: list[Any]) -> list[Tensor]:
    """Makes a list with a tensor for each sample, the target behind the inputs."""
    return [torch.cat([x, y.to(x.dtype).reshape(1)]) for x, y in samples]


def _as_lengths(samples: list[Any]) -> Any:
    """Cuts texts to a length that differs from batch to batch."""
    x, y = (torch.stack(column) for column in zip(*samples, strict=True))
    return (x, y) if x.is_floating_point() else (x[:, : 2 + int(y.sum()) % 4], y)


def _as_arrays(samples: list[Any]) -> Any:
    """Makes an array of the inputs."""
    x, y = (torch.stack(column) for column in zip(*samples, strict=True))
    return x.numpy(), y


def inputs_and_targets(batch: Any) -> tuple[Tensor, Tensor]:
    """Takes a batch of any of the loaders apart."""
    if isinstance(batch, Mapping) and "more" in batch:
        parts = [inputs_and_targets(part) for part in batch.values()]
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
    if isinstance(batch, Mapping):
        return batch["x"] * int(batch["scale"]), batch["y"]
    if isinstance(batch, Samples | Pair):
        return batch.x, batch.y
    if isinstance(batch[0], Tensor) and batch[0].ndim == 1:
        rows = torch.stack(list(batch))
        if rows.is_floating_point():
            return rows[:, :-1], rows[:, -1].long()
        return rows[:, :-1], rows[:, -1]
    if isinstance(batch[0], np.ndarray):
        return torch.from_numpy(batch[0]).to(batch[1].device), batch[1]
    return batch[0], batch[1]


COLLATES: dict[str, Callable[[list[Any]], Any]] = {
    "dicts": _as_dict,
    "list": _as_list,
    "dataclass": _as_dataclass,
    "named": _as_named,
    "lengths": _as_lengths,
    "arrays": _as_arrays,
}
LOADERS = (
    "ordered",
    "shuffled",
    "stream",
    *COLLATES,
    "augmented",
    "drawn",
    "workers",
    "batch_sampler",
    "two",
    "two_shortest",
)
OF_ONE_READER = ("augmented", "drawn", "lengths")
"""Loaders whose samples are those of one device only with one reader."""


def make_loader(case: Case, place: Place) -> Any:
    """Builds the loader of training batches, or several."""
    if case.data not in ("two", "two_shortest"):
        return _make_one(case, place, int(torch.randint(1000, ())) if case.data == "drawn" else 3)
    both = {"first": _make_one(case, place, 3), "more": _make_one(case, place, 4)}
    return both if case.data == "two" else CombinedLoader(both, "min_size")


def _make_one(case: Case, place: Place, seed: int) -> DataLoader[Any]:
    samples: Any = samples_of(case, case.num_samples, seed)
    batch_size = case.batch_size // place.num_replicas
    collate = COLLATES.get(case.data)
    if case.data == "stream":
        stream = Stream(samples, case.num_samples, place)
        return DataLoader(stream, batch_size, collate_fn=collate)
    if case.data == "augmented":
        samples = Augmented(samples)
    if case.data == "batch_sampler":
        own_sampler = ShareOf(SequentialSampler(samples), place)
        batches = BatchSampler(own_sampler, batch_size, drop_last=False)
        return DataLoader(samples, batch_sampler=batches)
    if case.data != "shuffled":
        sampler = ShareOf(SequentialSampler(samples), place)
        # As in a script; a pool's worker would start an interpreter, for many seconds on a busy
        # machine.
        workers: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
        options = workers if case.data == "workers" else {}
        return DataLoader(samples, batch_size, sampler=sampler, collate_fn=collate, **options)
    generator = torch.Generator().manual_seed(11)
    if place.num_replicas == 1:
        return DataLoader(samples, batch_size, shuffle=True, generator=generator)
    shuffled = ShareOf(RandomSampler(samples, generator=generator), place)
    return DataLoader(samples, batch_size, sampler=shuffled, generator=generator)


def make_validation_loader(case: Case, place: Place) -> DataLoader[Any]:
    """Builds the loader of validation batches: two, the second one half as large."""
    num_samples = case.batch_size + case.batch_size // 2
    samples = samples_of(case, num_samples, seed=5)
    own = Subset(samples, range(place.rank, num_samples, place.num_replicas))
    collate = COLLATES.get(case.data)
    return DataLoader(own, case.batch_size // place.num_replicas, collate_fn=collate)


class Loaders(L.LightningDataModule):
    """Has the loaders, and a number that goes into checkpoints.

    Args:
        case: Names the loaders.
        place: Which share to read.
        events: Gets the names of hooks that are called.
    """

    def __init__(self, case: Case, place: Place, events: list[str]) -> None:
        super().__init__()
        self._case = case
        self._place = place
        self._events = events
        self._factor = 0.5

    def setup(self, stage: str) -> None:
        self._events.append(f"data.setup {stage}")

    def teardown(self, stage: str) -> None:
        self._events.append(f"data.teardown {stage}")

    def train_dataloader(self) -> Any:
        self._events.append("data.train_dataloader")
        return make_loader(self._case, self._place)

    def val_dataloader(self) -> Any:
        self._events.append("data.val_dataloader")
        loaders = [
            make_validation_loader(self._case, self._place) for _ in range(self._case.val_loaders)
        ]
        return loaders if len(loaders) > 1 else loaders[0]

    def test_dataloader(self) -> Any:
        return make_validation_loader(self._case, self._place)

    predict_dataloader = test_dataloader

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert self.trainer is not None
        return _scaled(batch, self._factor if self.trainer.training else 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self._factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._factor = state_dict["factor"] * 0.5


def _scaled(batch: Any, factor: float) -> Any:
    return apply_to_collection(
        batch, Tensor, lambda given: given * factor if given.is_floating_point() else given
    )
