"""Says at the start of training how a pipeline was cut, and how batch statistics are computed.

The size of the first batch decides the micro-batches, so the line waits for that batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.common.names import shorten
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.strategies.base.loaders.sample_lists import mark_first

_MOST_NAMES = 3


class StartLine(pl.Callback):
    """Prints the description of a pipeline on rank 0, when the first batch is there."""

    def __init__(
        self,
        pipeline: Pipeline,
        mesh: MeshShape,
        source: str,
        statistics: Sequence[str],
        *,
        are_synced: bool,
    ) -> None:
        self._pipeline = pipeline
        self._mesh = mesh
        self._source = source
        self._statistics = statistics
        self._are_synced = are_synced
        self._has_printed = False

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *_: Any
    ) -> None:
        if not self._has_printed:
            self._has_printed = True
            sizes = self._pipeline.microbatch_sizes_of(mark_first(batch, trainer.train_dataloader))
            rank_zero_info(describe_pipeline(self._pipeline, self._mesh, self._source, sizes))
            are_whole = self._pipeline.asynchronous and len(sizes) == 1
            if self._statistics and not are_whole:
                rank_zero_info(explain_statistics(self._statistics, sizes, self._mesh.pp))
            if self._statistics and self._mesh.data_size > 1 and not self._are_synced:
                rank_zero_info(explain_own_statistics(self._statistics))


def describe_pipeline(
    pipeline: Pipeline, mesh: MeshShape, source: str, sizes: Sequence[int]
) -> str:
    """Describes a pipeline in one line."""
    shape = pipeline.shape
    versions = [1 + copies for copies in pipeline.stages.num_copies]
    parts = [
        f"Pipeline of {_counted(shape.num_stages, 'stage')} on {_counted(mesh.pp, 'rank')}",
        f"{_joined(shape.layers_per_stage, '+')} layers of {source}",
        f"schedule {shape.schedule!r}",
        f"{_counted(len(sizes), 'micro-batch')} of {_joined(sorted({*sizes}), ' or ')} sample"
        f"{'' if {*sizes} == {1} else 's'}",
    ]
    if max(versions) > 1:
        parts.append(f"{_joined(versions, '+')} versions of the weights")
    if mesh.data_size > 1:
        parts.append(f"{mesh.data_size} data replicas")
    return ", ".join(parts) + "."


def explain_statistics(names: Sequence[str], sizes: Sequence[int], num_ranks: int) -> str:
    """Explains which samples the statistics of a batch are computed over."""
    compute = f"{shorten(names, _MOST_NAMES)}: statistics of the batch"
    instead = (
        "GroupNorm or LayerNorm in its place, or schedule='pipedream', which takes whole batches"
    )
    if len(sizes) == 1:
        return (
            f"{compute} are kept. Each batch is one micro-batch, for which every stage works while"
            f" the others wait, {1 - 1 / num_ranks:.0%} of the time. Faster: {instead}, or"
            f" num_microbatches={4 * num_ranks}, which computes them of micro-batches."
        )
    return (
        f"{compute} are those of micro-batches of {max(sizes)} samples, where one device has"
        f" {sum(sizes)}. As on one device: num_microbatches=1, or {instead}."
    )


def explain_own_statistics(names: Sequence[str]) -> str:
    """Explains that replicas normalise by their own samples in some modules."""
    return (
        f"{shorten(names, _MOST_NAMES)}: statistics are those of a rank's own batch. For those of"
        " the batches of all ranks: Trainer(sync_batchnorm=True)."
    )


def _counted(count: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{'' if count == 1 else plural}"


def _joined(numbers: Iterable[int], between: str) -> str:
    return between.join(map(str, numbers))
