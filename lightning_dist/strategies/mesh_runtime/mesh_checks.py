"""Refuse what cannot be combined on one mesh, on all ranks alike, with the reason."""

from __future__ import annotations

from lightning_dist.engine.common.count import check_count
from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.parallelize.shard_config import Offload, ShardConfig
from lightning_dist.engine.splitting.config import PipelineConfig


def check_sizes(pp: object, dp_replicate: object, dp_shard: object, tp: object) -> None:
    """Checks the sizes of the axes, each by itself.

    Args:
        pp: As given to the strategy.
        dp_replicate: As given to the strategy.
        dp_shard: As given to the strategy.
        tp: As given to the strategy.

    Raises:
        ValueError: One is no number of ranks.
    """
    for name, size in (("pp", pp), ("dp_replicate", dp_replicate), ("tp", tp)):
        check_count(name, size)
    if dp_shard != "auto":
        check_count("dp_shard", dp_shard, instead="'auto'")


def check_mesh(pp: int, tp: int, pipeline: PipelineConfig, shard: ShardConfig) -> None:
    """Checks that a pipeline goes with the rest of the mesh.

    Args:
        pp: Stages.
        tp: Tensor-parallel ranks.
        pipeline: How it runs.
        shard: How parameters are sharded.

    Raises:
        ValueError: It does not.
    """
    if pipeline.asynchronous:
        raise ValueError(
            f"schedule={pipeline.schedule!r} keeps older versions of a stage's weights, each of"
            " which would have to be sharded and gathered by itself. Use schedule='1f1b' here, or"
            " PipelineStrategy(schedule='pipedream'), whose replicas hold whole stages."
        )
    if pipeline.partition == "profile":
        raise ValueError(
            "partition='profile' moves layers when it has measured, and here each rank has shards"
            " of its layers, or pieces. Use partition='parameters' or the layers per stage, or"
            " PipelineStrategy, whose replicas hold whole stages."
        )
    if pipeline.is_traced:
        raise ValueError(
            f"layers={pipeline.layers!r} runs the operations of a module without calling its parts,"
            " and parameters are gathered and spread where parts are called. Use"
            " PipelineStrategy(layers='trace'), whose replicas hold whole stages."
        )
    if (pp > 1 or tp > 1) and shard.policy.is_manual:
        raise ValueError(
            f"wrap='manual' with pp={pp}, tp={tp}: `configure_model` would shard layers before they"
            " are shared out among stages or spread. Use wrap='auto', or another policy."
        )


def check_offload(offload: Offload, shape: MeshShape) -> None:
    """Checks that what is to be kept in host memory exists.

    Args:
        offload: As given to the strategy.
        shape: Of the mesh.

    Raises:
        ValueError: No parameter is sharded.
    """
    if offload != "none" and shape.data_size == 1 and shape.world_size > 1:
        raise ValueError(
            f"offload={offload!r} keeps shards in host memory, and with dp_replicate=1 x dp_shard=1"
            " nothing is sharded: stages and tensor-parallel ranks compute with what they hold."
            " Use dp_shard=2 or more, or leave offload out."
        )


def check_dry_run(is_manual: bool, optimizer_states_per_parameter: int) -> None:
    """Checks what a dry run is asked for.

    Args:
        is_manual: Whether the module shards itself.
        optimizer_states_per_parameter: As given to it.

    Raises:
        ValueError: There is none of it.
    """
    if is_manual:
        raise ValueError(
            "wrap='manual': `configure_model` shards on a mesh of real processes, which a dry run"
            " has none of. Use wrap='auto', or another policy."
        )
    if optimizer_states_per_parameter < 0:
        raise ValueError(
            f"optimizer_states_per_parameter={optimizer_states_per_parameter} cannot be below zero;"
            " it is 2 for AdamW, 1 for momentum, 0 for plain SGD."
        )
