"""Recognise batches that are lists with a tensor for each sample.

``[x, y]`` of default collation has the samples in the tensors' first dim. A list of images or of
sequences, from a user's ``collate_fn``, has one tensor per sample. If the tensors are of equal
length, the batch itself does not tell. Then the loader's batch size does, on the first whole batch.
As many tensors as samples, each of as many rows, are columns, and so are those of later batches.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.utils.data import default_collate

from lightning_dist.engine.tensors.samples import SampleList


class SampleLists:
    """Marks batches with a tensor for each sample, for the pipeline to cut the list."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._known: dict[tuple[str, int], bool] = {}

    def mark(self, batch: Any, step: str, dataloader_idx: int = 0) -> Any:
        """Returns the batch, as a ``SampleList`` if it is a list with a tensor for each sample."""
        if not _lists_tensors(batch):
            return batch
        key, loader = (step, dataloader_idx), self._loader(step, dataloader_idx)
        if _collates_by_default(loader):  # it may have been reloaded
            return batch
        if key not in self._known or not _have_one_length(batch):
            found = has_tensor_per_sample(batch, _batch_size_of(loader))
            if found is None:
                return batch
            self._known[key] = found
        return SampleList(batch) if self._known[key] else batch

    def _loader(self, step: str, dataloader_idx: int) -> Any:
        name = {
            "training_step": "train_dataloader",
            "validation_step": "val_dataloaders",
            "test_step": "test_dataloaders",
            "predict_step": "predict_dataloaders",
        }[step]
        loaders = getattr(self._trainer, name)
        is_several = isinstance(loaders, list | tuple) and step != "training_step"
        return loaders[dataloader_idx] if is_several else loaders


def mark_first(batch: Any, loader: object) -> Any:
    """Returns a loader's first batch, as :meth:`SampleLists.mark` does later ones."""
    if not _lists_tensors(batch) or _collates_by_default(loader):
        return batch
    return SampleList(batch) if has_tensor_per_sample(batch, _batch_size_of(loader)) else batch


def _lists_tensors(batch: Any) -> bool:
    is_list = type(batch) is list and bool(batch)
    return is_list and all(isinstance(entry, Tensor) and entry.ndim > 0 for entry in batch)


def _have_one_length(batch: list[Tensor]) -> bool:
    return len({len(tensor) for tensor in batch}) == 1


def _collates_by_default(loader: object) -> bool:
    return getattr(loader, "collate_fn", default_collate) is default_collate


def _batch_size_of(loader: object) -> int | None:
    size: int | None = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size


def has_tensor_per_sample(batch: list[Tensor], batch_size: int | None) -> bool | None:
    """Returns whether a list has one tensor for each sample, or one for each column.

    Args:
        batch: Tensors with a first dim.
        batch_size: Number of samples in whole batches, if known.

    Returns:
        True for one tensor per sample, False for one per column, None if both are possible.
    """
    if not _have_one_length(batch):
        return True
    length = len(batch[0])
    if length == batch_size:
        return False
    if batch_size is None or length == len(batch):
        return None
    if len(batch) == batch_size:
        return True
    if max(length, len(batch)) > batch_size:
        return len(batch) < length
    return None
