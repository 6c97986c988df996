"""Finds the stages of a model: by its layers' names, by what forwards run in order, or by a trace.

On a mesh modules are preferred, for they can be sharded one by one, over tensor-parallel ranks too.
Where each rank has its layers whole, a trace is preferred to the LightningModule's own forward,
which a step need not call.
"""

from __future__ import annotations

from contextlib import suppress

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.engine.common.device_mesh import axis
from lightning_dist.engine.parallelize.parallelism import Parallelism
from lightning_dist.engine.splitting.blocks.find_blocks import (
    LayersNotFoundError,
    SeveralListsError,
)
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.splitting.split import PipelineSplit, find_split
from lightning_dist.engine.splitting.tracing.example import CallExample
from lightning_dist.engine.splitting.tracing.split import find_traced_split, is_traced


def find_stages(
    module: nn.Module, mesh: DeviceMesh, config: PipelineConfig, asked: Parallelism
) -> PipelineSplit:
    """Finds this rank's stages of a model, before any is cut.

    Raises:
        ValueError: The model cannot be cut as configured.
    """
    stages = axis(mesh, "pp")
    size, rank = (1, 0) if stages is None else (stages.size(), stages.get_local_rank())
    goes_on = config.layers == "auto" and is_traced(module)
    not_found: LayersNotFoundError | None = None
    if not (config.is_traced or goes_on):
        try:
            return find_split(module, config, size, rank)
        except LayersNotFoundError as error:
            not_found = error
        if asked.example is None or asked.shard is not None:  # there is no trace to prefer
            with suppress(LayersNotFoundError):
                return find_split(module, config, size, rank, by_forwards=True)
    example = _check_traceable(mesh, asked, size, not_found)
    try:
        return find_traced_split(module, config, size, rank, asked.half, example)
    except ValueError as error:
        if not_found is not None and not is_traced(module):
            with suppress(LayersNotFoundError):  # its head may be what cannot be traced
                return find_split(module, config, size, rank, by_forwards=True)
        if isinstance(not_found, SeveralListsError):  # a name of a list is the simplest way
            raise ValueError(f"{not_found} Tracing it failed, too: {error}") from None
        if not_found is None or is_traced(module):
            raise
        raise ValueError(
            f"{error} Or change the model so that it needs no trace. {not_found}"
        ) from None


def _check_traceable(
    mesh: DeviceMesh, asked: Parallelism, size: int, not_found: LayersNotFoundError | None
) -> CallExample:
    """Returns the example to trace a model with, if its stages can be what is asked for."""
    if isinstance(not_found, SeveralListsError) and asked.example is None:
        raise ValueError(str(not_found))
    why = "" if not_found is None else f" {not_found}"
    if asked.example is None:
        raise ValueError(
            f"Use a strategy with {size} stages in a run, which traces other models by its first"
            f" batch, or leave out the stages. To cut the model without one:{why}"
        )
    if asks := _not_for_graphs(mesh, asked):
        raise ValueError(
            f"{', '.join(asks)}: this model has to be traced to be cut into stages, and what is"
            " traced runs as a graph, which calls no modules. Leave it out, or name the model's"
            f" list of layers with PipelineConfig(layers=...).{why}"
        )
    return asked.example


def _not_for_graphs(mesh: DeviceMesh, asked: Parallelism) -> list[str]:
    """Lists what is asked for and needs calls of modules."""
    tensor, shard = axis(mesh, "tp"), asked.shard
    is_sharded = asked.shards_parameters
    found = {
        "tp": tensor is not None and tensor.size() > 1,
        "compile": shard is not None and shard.compile,
        "activation_checkpointing": shard is not None and shard.activation_checkpointing != "none",
        "wrap": shard is not None and is_sharded and shard.wrap != "auto",
        "MixedPrecision with shards": is_sharded and asked.half is not None,
        "sync_batchnorm": bool(asked.joint_statistics),
    }
    return [name for name, is_asked in found.items() if is_asked]
