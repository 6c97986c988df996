"""Several parallelisms at once: replicas x shards x tensor-parallel ranks in one argument.

The named strategies are special cases of what :class:`ShardedStrategy` composes; this one leaves
all of its dials free.
"""

from __future__ import annotations

from typing import Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from typing_extensions import override

from lightning_dist.mesh import MeshShape, fill_mesh
from lightning_dist.strategies import fsdp_checks
from lightning_dist.strategies.distributed import StartMethod
from lightning_dist.strategies.shard_config import ShardConfig
from lightning_dist.strategies.sharded import ShardedStrategy
from lightning_dist.tensor.config import TensorConfig


class MeshStrategy(ShardedStrategy):
    """Trains a model on a mesh of ranks.

    Ranks are numbered with ``tp`` innermost, then ``dp_shard``, then ``dp_replicate``.

    Args:
        dp_replicate: Replicas of the model.
        dp_shard: Ranks that share a replica's parameters; ``"auto"`` takes what is left.
        tp: Ranks that share each layer.
        shard: As for :class:`~lightning_dist.FSDPStrategy`.
        tensor: As for :class:`~lightning_dist.TensorParallelStrategy`.
        meta_init: Build in ``configure_model`` without memory, and give values part by part.
        timeout_s: Seconds that a rank waits for another before it gives up.
        save_full: Write one ordinary ``.ckpt`` file instead of a directory of shards.
        accelerator: As for any Lightning strategy.
        parallel_devices: As for any Lightning strategy.
        cluster_environment: As for any Lightning strategy.
        checkpoint_io: As for any Lightning strategy.
        precision_plugin: As for any Lightning strategy.
        process_group_backend: ``"gloo"`` or ``"nccl"``; None takes the device's own.
        start_method: Only ``"popen"``, which runs the script once per device.

    Raises:
        ValueError: An argument is unknown.
    """

    def __init__(
        self,
        dp_replicate: int = 1,
        dp_shard: int | Literal["auto"] = "auto",
        tp: int = 1,
        shard: ShardConfig = ShardConfig(),  # noqa: B008  (it is frozen)
        tensor: TensorConfig = TensorConfig(),  # noqa: B008
        meta_init: bool = True,
        timeout_s: float = 1800.0,
        save_full: bool = False,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: StartMethod = "popen",
    ) -> None:
        super().__init__(
            shard,
            tensor,
            meta_init,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout_s=timeout_s,
            start_method=start_method,
            save_full=save_full,
        )
        self._sizes = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp}

    @override
    def mesh_shape(self, world_size: int) -> MeshShape:
        shape = fill_mesh(world_size, **self._sizes)
        fsdp_checks.check_reshard(self._shard_config.reshard_after_forward, shape.dp_shard)
        return shape
