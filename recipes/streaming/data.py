"""Shards as batches of a stream that goes on where it was, in the middle of an epoch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import lightning as L
import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from recipes.streaming.shards import (
    PARTS,
    found_shards,
    read_format,
    shard_paths,
    write_shards,
)

try:
    from datasets import load_dataset
    from datasets.distributed import split_dataset_by_node
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError as error:
    raise ImportError(
        f"{error}. Streams need datasets and torchdata. Use `pip install 'lightning-dist[data]'`."
    ) from error

Batch: TypeAlias = tuple[Tensor, Tensor]


class WindowShuffle:
    """Reorders the samples of a window, otherwise in each epoch.

    The order follows from the seed, the epoch and the window's place in the stream. So a resumed
    stream needs no samples of the window in its state: it reads the window again. (The library's
    own buffer would be empty after resuming.)

    Args:
        seed: Base seed.

    Attributes:
        epoch: The epoch to draw orders for.
    """

    def __init__(self, seed: int) -> None:
        self.epoch = 0
        self._seed = seed

    def __call__(self, window: dict[str, list[Any]], places: list[int]) -> dict[str, list[Any]]:
        """Returns the samples of a window in another order.

        Args:
            window: Columns of the samples.
            places: Places of the samples in the stream of this worker.
        """
        random = np.random.default_rng([self._seed, self.epoch, places[0]])
        order = random.permutation(len(places))
        return {name: [column[index] for index in order] for name, column in window.items()}


class StreamLoader:
    """Batches of a stream, with a length, in the order of the trainer's epoch.

    Lightning tells samplers the epoch, and a stream has none. Of a loader without a length it reads
    a batch ahead, which the loader's state would count.

    Args:
        loader: Loads the stream, and knows where it is.
        num_batches: Batches of an epoch.
        epoch: Returns the epoch at hand.
        shuffle: Shuffles windows of the stream; None leaves the order as it is in all epochs.
    """

    def __init__(
        self,
        loader: StatefulDataLoader[Batch],
        num_batches: int,
        epoch: Callable[[], int],
        shuffle: WindowShuffle | None,
    ) -> None:
        self._loader = loader
        self._num_batches = num_batches
        self._epoch = epoch
        self._shuffle = shuffle

    def __len__(self) -> int:
        """Returns the number of batches of an epoch."""
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        """Begins an epoch, or goes on in the one that a loaded state is of."""
        if self._shuffle is not None:
            self._shuffle.epoch = epoch = self._epoch()
            self._loader.dataset.set_epoch(epoch)
        return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the stream."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next iteration go on where the state says, if it is of the same epoch."""
        self._loader.load_state_dict(state)


def inputs_and_targets(samples: Sequence[dict[str, Any]]) -> Batch:
    """Returns inputs and targets, int64 of shape ``(B, T)`` each, of rows of ``T + 1`` tokens."""
    rows = torch.from_numpy(np.array([sample["tokens"] for sample in samples], dtype=np.int64))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class TokenStreamDataModule(L.LightningDataModule):
    """Language modelling on shards of tokens, which are read as a stream.

    Batches are ``(inputs, targets)``, int64 of shape ``(batch_size, sequence_length)``. Each data
    replica reads shards of its own, in another order in each epoch, and each worker some of these.
    A checkpoint has the place of each replica's stream.

    Args:
        folder: Folder that ``python -m recipes.streaming.shards`` has written.
        batch_size: Sequences per batch and data replica.
        sequence_length: Tokens of a sequence, as in the shards.
        vocab_size: Different tokens that the model knows, as in the shards.
        window: Sequences that are read ahead to be shuffled, per worker.
        seed: Seed of the training order.
        num_workers: Processes per data replica that read; each needs as many shards.
        shards: Shards to write if the folder has none; 0 writes none.

    Raises:
        ImportError: datasets or torchdata is not installed.
        ValueError: A size is not positive.
    """

    def __init__(
        self,
        folder: str = "runs/shards",
        batch_size: int = 32,
        sequence_length: int = 128,
        vocab_size: int = 256,
        window: int = 256,
        seed: int = 0,
        num_workers: int = 0,
        shards: int = 0,
    ) -> None:
        super().__init__()
        for name, size in (("batch_size", batch_size), ("window", window)):
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1.")
        self.save_hyperparameters()
        self._folder = Path(folder)
        self._batch_size = batch_size
        self._expected = {"sequence_length": sequence_length, "vocab_size": vocab_size}
        self._window = window
        self._seed = seed
        self._num_workers = num_workers
        self._shards_to_write = shards
        self._rows: dict[str, int] = {}

    @override
    def prepare_data(self) -> None:
        has_any = any(found_shards(self._folder, part) for part in PARTS)
        if self._shards_to_write and not has_any:
            length = self._expected["sequence_length"]
            for line in write_shards(self._folder, length, self._shards_to_write):
                print(line)

    @override
    def setup(self, stage: str) -> None:
        """Checks the shards.

        Raises:
            ValueError: They are not there, not all there, or of another format.
        """
        self._rows = {part: count_rows(self._folder, part, self._expected) for part in PARTS}

    @override
    def train_dataloader(self) -> StreamLoader:
        return self._loader("train", WindowShuffle(self._seed))

    @override
    def val_dataloader(self) -> StreamLoader:
        return self._loader("validation", None)

    @override
    def test_dataloader(self) -> StreamLoader:
        return self._loader("validation", None)

    @override
    def predict_dataloader(self) -> StreamLoader:
        return self._loader("validation", None)

    def _loader(self, part: str, shuffle: WindowShuffle | None) -> StreamLoader:
        trainer = self.trainer
        replica = (trainer.distributed_sampler_kwargs if trainer else None) or {}
        num_replicas, rank = replica.get("num_replicas", 1), replica.get("rank", 0)
        paths = [str(path) for path in found_shards(self._folder, part)]
        num_workers = self._num_workers if shuffle is not None else 0
        check_division(len(paths), num_replicas, num_workers)
        if shuffle is not None:  # the first epoch's order; the others' follow from it
            paths = [paths[i] for i in np.random.default_rng(self._seed).permutation(len(paths))]
        stream = load_dataset("parquet", data_files=paths, split="train", streaming=True)
        stream = split_dataset_by_node(stream, rank, num_replicas)
        if shuffle is not None:
            stream = stream.map(shuffle, with_indices=True, batched=True, batch_size=self._window)
        rows = self._rows[part] * len(paths) // num_replicas // max(1, num_workers)
        full, rest = divmod(rows, self._batch_size)
        drops = shuffle is not None
        if not full and drops:
            raise ValueError(
                f"batch_size={self._batch_size} is more than the {rows} sequences that a reader has"
                f" of {self._folder / part}. Use smaller batches, fewer replicas or num_workers."
            )
        with warnings.catch_warnings():
            # torchdata 0.11 calls what torch 2.13 has deprecated, to no effect.
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")
            loader = StatefulDataLoader(
                stream,
                batch_size=self._batch_size,
                drop_last=drops,
                num_workers=num_workers,
                collate_fn=inputs_and_targets,
            )
        num_batches = max(1, num_workers) * (full + (0 if drops else bool(rest)))
        return StreamLoader(
            loader, num_batches, lambda: trainer.current_epoch if trainer else 0, shuffle
        )


def count_rows(folder: Path, part: str, expected: dict[str, int]) -> int:
    """Checks the shards of a part, and returns the number of rows of each.

    Args:
        folder: Folder of the parts.
        part: Name of the part.
        expected: Values that the shards' format must have, by name.

    Raises:
        ValueError: Shards are missing, or of another format.
    """
    import pyarrow.parquet as pq

    write = f"python -m recipes.streaming.shards {folder}"
    paths = found_shards(folder, part)
    if not paths:
        raise ValueError(f"There are no shards in {folder / part}. Write them: `{write}`.")
    first = read_format(paths[0])
    wrong = [f"{n}={v}" for n, v in expected.items() if getattr(first, n) != v]
    if wrong:
        has = ", ".join(f"{name} {getattr(first, name)}" for name in expected)
        raise ValueError(
            f"The shards in {folder / part} have {has}, and {', '.join(wrong)} was asked for."
            " Give the data module and the model what the shards have, or write others."
        )
    if paths != shard_paths(folder, part, first.num_shards):
        raise ValueError(
            f"{folder / part} has {len(paths)} of {first.num_shards} shards. The command that was"
            f" interrupted goes on: `{write} --sequence-length {first.sequence_length} --shards"
            f" {first.num_shards}`."
        )
    for path in paths[1:]:
        if differences := read_format(path).differences(first):
            raise ValueError(f"{path} has {differences} as {paths[0].name} has. Write both anew.")
    return int(pq.read_metadata(paths[0]).num_rows)


def check_division(num_shards: int, num_replicas: int, num_workers: int) -> None:
    """Checks that readers can have equally many shards.

    Raises:
        ValueError: They cannot.
    """
    readers = num_replicas * max(1, num_workers)
    if num_shards % readers:
        of_each = f" of {num_workers} workers each" if num_workers else ""
        raise ValueError(
            f"{num_shards} shards cannot be shared out evenly to {num_replicas} data"
            f" replicas{of_each}. Write a multiple of {readers} shards (`--shards {readers}`), or"
            " train with other numbers."
        )
