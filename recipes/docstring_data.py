"""Docstrings as batches of tokens, for a model that tells their area."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from recipes.docstrings import Docstring, load_docstrings, split_docstrings
from recipes.minilm import load_tokenizer
from recipes.streaming.buckets import LengthBuckets
from recipes.text import SeededShuffle, replica_of

# Sharded ranks evaluate together, so each needs as many docstrings as the others: 2, 4 or 8 have.
EVALUATED_MULTIPLE = 8


class DocstringDataModule(L.LightningDataModule):
    """Docstrings of the standard library with the area of the library that they come from.

    Batches are ``(tokens, labels)``, int64 of shapes ``(batch_size, T)`` and ``(batch_size,)``,
    padded with zeros behind the longest text of the batch.

    Args:
        folder: Folder of the tokenizer; ``None`` means the one in the package of MiniLM's weights.
        batch_size: Docstrings per batch and data replica.
        sequence_length: Tokens per docstring, at most.
        seed: Seed of the split and the training order.
        num_workers: Processes that load data; the tokens are in memory, so none are needed.
        tokens_per_batch: If given, training batches have docstrings of like length, and so many of
            them that each has about this many tokens; ``batch_size`` is for evaluation then.

    Attributes:
        train_docstrings: Docstrings to train on.
        val_docstrings: Docstrings to validate on, from other modules.
        test_docstrings: Docstrings to test on, from other modules again.

    Raises:
        ImportError: The tokenizer is not installed.
        ValueError: A size is too small.
    """

    def __init__(
        self,
        folder: str | None = None,
        batch_size: int = 32,
        sequence_length: int = 48,
        seed: int = 0,
        num_workers: int = 0,
        tokens_per_batch: int | None = None,
    ) -> None:
        super().__init__()
        for name, size, least in (
            ("batch_size", batch_size, 1),
            ("sequence_length", sequence_length, 3),  # one token between those of begin and end
        ):
            if size < least:
                raise ValueError(f"{name}={size} must be at least {least}.")
        self.save_hyperparameters()
        self._batch_size = batch_size
        self._seed = seed
        self._num_workers = num_workers
        self._tokens_per_batch = tokens_per_batch
        self._tokenizer = load_tokenizer(folder, sequence_length)
        self.train_docstrings, self.val_docstrings, self.test_docstrings = split_docstrings(
            load_docstrings(), seed, EVALUATED_MULTIPLE
        )
        self._train = self._encode(self.train_docstrings)
        self._val = self._encode(self.val_docstrings)
        self._test = self._encode(self.test_docstrings)

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        replica = replica_of(self)
        if self._tokens_per_batch is None:
            sampler = SeededShuffle(self._train, self._seed, len(self._train), **replica)
            return self._loader(self._train, sampler)
        lengths = (self._train.tensors[0] != 0).sum(dim=1)
        buckets = LengthBuckets(lengths, self._tokens_per_batch, self._seed, **replica)
        return DataLoader(
            self._train,
            batch_size=None,  # an index of the sampler is a whole batch
            sampler=buckets,
            num_workers=self._num_workers,
            collate_fn=trim,
        )

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        return self._evaluation_loader(self._val)

    @override
    def test_dataloader(self) -> DataLoader[Any]:
        return self._evaluation_loader(self._test)

    @override
    def predict_dataloader(self) -> DataLoader[Any]:
        return self._evaluation_loader(self._test)

    def _encode(self, docstrings: Sequence[Docstring]) -> TensorDataset:
        encoded = self._tokenizer.encode_batch([docstring.text for docstring in docstrings])
        tokens = torch.tensor([text.ids for text in encoded])  # (N, longest of all)
        return TensorDataset(tokens, torch.tensor([docstring.area for docstring in docstrings]))

    def _evaluation_loader(self, data: TensorDataset) -> DataLoader[Any]:
        sampler = UnrepeatedDistributedSampler(data, shuffle=False, **replica_of(self))
        return self._loader(data, sampler)

    def _loader(self, data: TensorDataset, sampler: Any) -> DataLoader[Any]:
        return DataLoader(
            data,
            batch_size=self._batch_size,
            sampler=sampler,
            num_workers=self._num_workers,
            collate_fn=collate,
        )


def collate(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Creates a batch without the padding that all its texts have in common.

    Args:
        samples: Tokens, ``(L,)`` with zeros at the end, and a label each.

    Returns:
        Tokens, ``(B, T)`` with the longest text's ``T``, and labels, ``(B,)``.
    """
    tokens, labels = (torch.stack(column) for column in zip(*samples, strict=True))
    return trim((tokens, labels))


def trim(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns a batch of tokens and labels without the padding that all texts have in common."""
    tokens, labels = batch
    return tokens[:, : int((tokens != 0).sum(dim=1).max())], labels
