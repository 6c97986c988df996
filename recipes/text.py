"""Real English text without a download: the help topics that Python itself ships.

``pydoc_data.topics`` holds the language reference as plain text, about 466 KB, under the PSF
licence. It differs a little between patch versions of Python, so its hash is recorded with each
run. Some topics repeat others (``with`` and ``while`` stand in ``compound``), so about one in
thirteen windows of the validation text stands in the training text, too. Results compare with each
other, but say less of unseen text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sized
from pydoc_data.topics import topics
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from typing_extensions import override

VALIDATION_SHARE = 0.1


def load_text() -> bytes:
    """Joins all topics in the order of their names."""
    return "\n".join(topics[name] for name in sorted(topics)).encode()


def split_text(text: bytes) -> tuple[Tensor, Tensor]:
    """Cuts the last tenth off for validation.

    Args:
        text: The whole text.

    Returns:
        Training and validation bytes, ``(N,)`` and ``(M,)`` int64.
    """
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    cut = int(len(values) * (1 - VALIDATION_SHARE))
    return values[:cut], values[cut:]


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text with the text one byte on as target.

    Args:
        text: ``(N,)`` int64.
        sequence_length: Bytes per window.
        stride: Bytes from one window's start to the next one's.

    Raises:
        ValueError: A window is empty, or longer than the text.
    """

    def __init__(self, text: Tensor, sequence_length: int, stride: int) -> None:
        if sequence_length < 1:
            raise ValueError(f"sequence_length={sequence_length} must be at least 1 byte.")
        if len(text) <= sequence_length:
            raise ValueError(
                f"sequence_length={sequence_length} needs a text of more bytes than {len(text)}."
                " Use shorter sequences."
            )
        self._text = text
        self._sequence_length = sequence_length
        self._stride = stride

    def __len__(self) -> int:
        """Returns the number of windows."""
        return (len(self._text) - self._sequence_length - 1) // self._stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets, ``(T,)`` each."""
        start = index * self._stride
        window = self._text[start : start + self._sequence_length + 1]
        return window[:-1], window[1:]


class SeededShuffle(DistributedSampler[int]):
    """Shuffles by a seed and the epoch alone, so that all ranks read the same order.

    Data replicas take turns in that order. Lightning does not wrap a ``DistributedSampler``. Its
    wrapper around any other sampler would not set the epoch.

    Args:
        data: The data to shuffle.
        seed: Base seed.
        num_samples: Samples per epoch over all replicas, drawn anew in each.
        num_replicas: Number of data replicas; each has equally many samples.
        rank: The data replica that reads.
    """

    def __init__(
        self, data: Sized, seed: int, num_samples: int, num_replicas: int = 1, rank: int = 0
    ) -> None:
        super().__init__(data, num_replicas, rank, seed=seed)
        self.num_samples = min(num_samples, len(data)) // num_replicas

    @override
    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator)
        yield from order[self.rank :: self.num_replicas][: self.num_samples].tolist()


def replica_of(data: L.LightningDataModule) -> dict[str, int]:
    """Returns the number of data replicas and this one's index, as samplers take them."""
    given = data.trainer.distributed_sampler_kwargs if data.trainer else None
    return given or {"num_replicas": 1, "rank": 0}


class TextDataModule(L.LightningDataModule):
    """Byte-level language modelling on the standard library's help topics.

    Batches are ``(inputs, targets)``, int64 of shape ``(batch_size, sequence_length)``.

    Data replicas share the windows out, equally many to each, for sharded ones evaluate together.
    Validation leaves the last windows out where their number does not divide.

    Args:
        batch_size: Windows per batch and data replica.
        sequence_length: Bytes per window.
        train_samples: Windows per training epoch over all replicas, at random places.
        seed: Seed of the training order.
        num_workers: Processes that load data; the text is in memory, so none are needed.

    Attributes:
        text_sha256: Hash of the text, among the hyperparameters and in checkpoints too.

    Raises:
        ValueError: A size is not positive, or a window is longer than the validation text.
    """

    def __init__(
        self,
        batch_size: int = 32,
        sequence_length: int = 128,
        train_samples: int = 3200,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        for name, size in (("batch_size", batch_size), ("train_samples", train_samples)):
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1.")
        text = load_text()
        self.text_sha256 = hashlib.sha256(text).hexdigest()
        self.save_hyperparameters()
        self.save_hyperparameters({"text_sha256": self.text_sha256})
        self.train_text, self.val_text = split_text(text)
        self._batch_size = batch_size
        self._num_workers = num_workers
        self._train = Windows(self.train_text, sequence_length, stride=1)
        self._val = Windows(self.val_text, sequence_length, stride=sequence_length)
        self._seed = seed
        self._train_samples = train_samples

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(
            self._train,
            batch_size=self._batch_size,
            sampler=SeededShuffle(self._train, self._seed, self._train_samples, **replica_of(self)),
            num_workers=self._num_workers,
        )

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        return self._evaluation_loader()

    @override
    def test_dataloader(self) -> DataLoader[Any]:
        return self._evaluation_loader()

    @override
    def predict_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._val, batch_size=self._batch_size, num_workers=self._num_workers)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"text_sha256": self.text_sha256}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["text_sha256"] != self.text_sha256:
            rank_zero_warn(
                f"The checkpoint was trained on the text {state_dict['text_sha256'][:12]}, this"
                f" Python ships {self.text_sha256[:12]}: training goes on, but bits per byte before"
                " and after do not compare. Use the same patch version of Python."
            )

    def _evaluation_loader(self) -> DataLoader[Any]:
        return DataLoader(
            self._val,
            batch_size=self._batch_size,
            sampler=DistributedSampler(
                self._val,
                shuffle=False,
                drop_last=True,  # else a window would count twice
                **replica_of(self),
            ),
            num_workers=self._num_workers,
        )
