"""Returns all predictions from ``trainer.predict`` on each rank, under any layout.

Data replicas predict for different samples, in an order that only their sampler knows. So samples
are joined by their index in the data set. Stages and tensor-parallel ranks of a replica have the
same predictions, and only the first of them sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import IterableDataset
from typing_extensions import override

from lightning_dist.engine.common.device_group import gather_objects
from lightning_dist.strategies.base.rank_view import view_of


class GatherPredictions(BasePredictionWriter):
    """Makes ``trainer.predict`` return all predictions, in the order of the data set.

    Each rank returns the same as one device: a list with one entry, in which the predictions of all
    batches are joined; with several loaders a list of such lists. A sample that a sampler repeats
    is there once. The whole predictions must fit into each rank's memory.

    ``predict_step`` returns a tensor with a row for each sample, a list with an entry for each
    sample, or a tuple or mapping of these. ``return_predictions=False`` leaves the callback out.

    Raises:
        ValueError: Replicas read a loader that does not say which samples a batch has, or
            predictions cannot be joined.
    """

    def __init__(self) -> None:
        super().__init__("epoch")

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for loader in CombinedLoader(trainer.predict_dataloaders, "sequential").flattened:
            is_iterable = isinstance(getattr(loader, "dataset", None), IterableDataset)
            has_indices = getattr(loader, "batch_sampler", None) is not None and not is_iterable
            if view_of(trainer).mesh.data_size > 1 and not has_indices:
                raise ValueError(
                    "GatherPredictions cannot order what replicas predict: the batches of a loader"
                    " have no indices. Use a DataLoader whose data set has a length, or leave out"
                    " the callback."
                )

    @override
    def write_on_epoch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        loop = trainer.predict_loop
        if not loop.return_predictions:
            return
        lists: Any = [predictions] if loop.num_dataloaders == 1 else predictions
        for batches, indices in zip(lists, batch_indices, strict=True):
            own = (list(batches), [index for batch in indices for index in batch])
            parts = _gather(trainer, own)
            values = [value for part, _ in parts for value in part]
            if any(value is not None for value in values):
                batches[:] = [_join(values, [index for _, found in parts for index in found])]


def _gather(trainer: pl.Trainer, own: Any) -> list[Any]:
    """Returns the parts of all replicas. Collective: every rank must call it."""
    view = view_of(trainer)
    if view.mesh.data_size == 1:
        return [own]  # stages and tensor-parallel ranks have the same predictions
    group = view.group_of_all("predictions")
    place = view.mesh.coordinates(trainer.global_rank)
    is_first = place["pp"] == place["tp"] == 0
    return [part for part in gather_objects(own if is_first else None, group) if part is not None]


def _join(values: Sequence[Any], read: list[int]) -> Any:
    """Joins the predictions of batches in the order of the data set.

    Args:
        values: The predictions.
        read: Index of each sample that was read; none where samples have no index, and predictions
            stay in order.
    """
    first = values[0]
    joined: Any
    if isinstance(first, Mapping):
        return {key: _join([value[key] for value in values], read) for key in first}
    if isinstance(first, tuple):
        parts = [_join(column, read) for column in zip(*values, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if all(isinstance(v, Tensor) and v.ndim and v.shape[1:] == first.shape[1:] for v in values):
        joined = torch.cat(list(values))
    elif all(isinstance(v, list) for v in values):
        joined = [entry for value in values for entry in value]
    else:
        found = {str(tuple(v.shape)) if isinstance(v, Tensor) else type(v).__name__ for v in values}
        raise ValueError(
            f"GatherPredictions cannot join {', '.join(sorted(found))}. Return tensors with a row"
            " for each sample and else equal shapes, or a list with an entry for each sample."
        )
    if not read:
        return joined
    if len(joined) != len(read):
        raise ValueError(
            f"predict_step has returned {len(joined)} rows or entries for {len(read)} samples, so"
            " GatherPredictions cannot tell whose they are. Return one for each sample: of several,"
            " a tensor with one more dimension, or a list of lists."
        )
    positions = {
        index: position for position, index in reversed(list(enumerate(read)))
    }  # the first
    order = [positions[index] for index in sorted(positions)]
    return joined[torch.tensor(order)] if isinstance(joined, Tensor) else [joined[i] for i in order]
