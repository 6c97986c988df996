"""Recognise lists and tuples with an entry for each sample.

``[x, y]`` of default collation has the samples in the tensors' first dim. A list of images or of
sequences, from a user's ``collate_fn``, has one tensor per sample. If the tensors are of equal
length, the batch itself does not tell. Then the loader's batch size does, on the first whole batch.
As many tensors as samples, each of as many rows, are columns, and so are those of later batches.

``tuple(zip(*samples))`` gives such a tuple for each column, ``(images, labels)``. Lists and tuples
inside of a batch, and the batch that is a tuple, are known by the batch size alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import default_collate

from lightning_dist.engine.tensors.samples import SampleList, SampleTuple
from lightning_dist.engine.tensors.tree import tensors_in

_LOADERS: Mapping[str, str] = MappingProxyType(
    {
        "training_step": "train_dataloader",
        "validation_step": "val_dataloaders",
        "test_step": "test_dataloaders",
        "predict_step": "predict_dataloaders",
    }
)


class SampleLists:
    """Marks lists and tuples with an entry for each sample, for the pipeline to cut them."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._known: dict[tuple[Any, ...], bool] = {}

    def mark(self, batch: Any, step: str, dataloader_idx: int = 0) -> Any:
        """Returns the batch, with a ``SampleList`` for each list with an entry for each sample.

        A tuple becomes a ``SampleTuple``. A training batch of several loaders has a batch of each.
        """
        loaders = getattr(self._trainer, _LOADERS[step])
        if step != "training_step":
            loaders = CombinedLoader(loaders, "sequential").flattened[dataloader_idx]
        return _mark(batch, loaders, self._known, (step, dataloader_idx))


def mark_first(batch: Any, loader: object) -> Any:
    """Returns a loader's first batch, as :meth:`SampleLists.mark` does later ones."""
    return _mark(batch, loader, {}, ())


def _mark(
    batch: Any, loader: Any, known: dict[tuple[Any, ...], bool], place: tuple[Any, ...]
) -> Any:
    """Marks a batch, or the parts of one that has a batch of each loader.

    Args:
        batch: It.
        loader: Its loader, or a dict, list or tuple of them.
        known: What earlier batches have told, by place.
        place: The place of the loader.
    """
    if isinstance(loader, dict) and isinstance(batch, dict) and loader.keys() == batch.keys():
        return {n: _mark(part, loader[n], known, (*place, n)) for n, part in batch.items()}
    if type(loader) in (list, tuple) and type(batch) is type(loader) and len(batch) == len(loader):
        parts = zip(batch, loader, strict=True)
        return type(batch)(_mark(*both, known, (*place, i)) for i, both in enumerate(parts))
    if _collates_by_default(loader):  # it may have been reloaded
        return batch
    if not _lists_tensors(batch):
        return _mark_columns(batch, _batch_size_of(loader), known, place)
    if place not in known or not _have_one_length(batch):
        found = has_tensor_per_sample(batch, _batch_size_of(loader))
        if found is None:
            return batch
        known[place] = found
    return SampleList(batch) if known[place] else batch


def _mark_columns(
    tree: Any, batch_size: int | None, known: dict[tuple[Any, ...], bool], place: tuple[Any, ...]
) -> Any:
    """Marks lists and tuples in a batch whose entries are trees of tensors like each other.

    Of dicts for each sample :mod:`.engine.tensors.samples` finds out by itself.
    """
    tensors = tensors_in(tree)
    if batch_size is None or not tensors:
        return tree
    if type(tree) is dict:
        return {n: _mark_columns(e, batch_size, known, (*place, n)) for n, e in tree.items()}
    if type(tree) not in (list, tuple):
        return tree
    if place not in known and _are_alike(tree):
        if any(tensor.ndim > 0 and len(tensor) == batch_size for tensor in tensors):
            known[place] = False
        elif len(tree) == batch_size:
            known[place] = True
    if known.get(place, False):
        return SampleList(tree) if type(tree) is list else SampleTuple(tree)
    parts = enumerate(tree)
    return type(tree)(_mark_columns(e, batch_size, known, (*place, i)) for i, e in parts)


def _are_alike(entries: Iterable[Any]) -> bool:
    """Returns whether entries, which are no dicts, have tensors of the same dtypes and dims."""
    found = set()
    for entry in entries:
        if isinstance(entry, Mapping):
            return False
        found.add(tuple((tensor.dtype, tensor.ndim) for tensor in tensors_in(entry)))
    return len(found) == 1 and found != {()}


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
