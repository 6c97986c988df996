"""Tensor parallelism: each layer's weights, and the work with them, sharded over ranks.

The user's own layers are cut as Megatron-LM cuts its layers by hand. A projection is cut by its
output features, the next one by its input features. Between the two each rank has a shard of the
features. :mod:`.engine.tensor_parallel` has the parts; the user's steps see plain, whole tensors.
"""

from __future__ import annotations

from typing import Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from typing_extensions import override

from lightning_dist.engine.common.environment import EnvironmentCheck
from lightning_dist.engine.common.mesh_shape import MeshShape, fill_axis
from lightning_dist.engine.parallelize.shard_config import ShardConfig
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from lightning_dist.strategies.base.distributed import Read
from lightning_dist.strategies.base.process_mesh import StartMethod
from lightning_dist.strategies.mesh_runtime.sharded import ShardedStrategy


class TensorParallelStrategy(ShardedStrategy):
    """Spreads a model's layers over ranks, and trains replicas of it if there are more.

    The world size is ``tp_size`` times the number of data replicas.

    Args:
        tp_size: Number of ranks that share each layer; ``"auto"`` takes all ranks.
        plan: Styles of layers, by patterns of module names (``*`` stands for one part of
            a name), such as ``{"layers.*.q_proj": "colwise"}``; see
            :mod:`.layers.styles`. ``"auto"`` takes the module's own
            ``tensor_parallel_plan()``, or finds the layers of transformers.
        sequence_parallel: Whether each rank has a part of the sequence between the layers, so that
            norms, dropout and residual sums are sharded, too. The traffic stays the same.
        loss_parallel: Whether to compute ``F.cross_entropy`` on each rank's part of the vocabulary;
            the whole logits then exist nowhere.
        meta_init: Whether ``configure_model`` builds without memory, to be filled part by part.
        timeout_s: Seconds that a rank waits for another before it gives up.
        save_full: Whether to write one ordinary ``.ckpt`` file, or else a directory of shards. None
            writes the file if a rank holds the whole model.
        async_save: Whether a thread writes checkpoints, from a copy in host memory, while training
            goes on.
        read: Which ranks of a data replica read its batches. The ``"first"`` sends them to the
            others, so that a run draws its data as one device would. With ``"each"``, all ranks of
            a replica must draw the same.
        accelerator, parallel_devices, cluster_environment: As for any Lightning strategy.
        checkpoint_io, precision_plugin: As for any Lightning strategy.
        process_group_backend: ``"gloo"`` or ``"nccl"``, for what is on the device; None takes the
            device's own. Control messages always go over gloo.
        start_method: Only ``"popen"``, which runs the script once per device.
        check_environment: What to do at the start if hosts have other versions, variables or
            scripts: ``"warn"``, ``"error"`` or ``"off"``.

    Raises:
        ValueError: An argument is unknown.
    """

    def __init__(
        self,
        tp_size: int | Literal["auto"] = "auto",
        plan: Literal["auto"] | dict[str, str] = "auto",
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        meta_init: bool = True,
        timeout_s: float = 1800.0,
        save_full: bool | None = None,
        async_save: bool = False,
        read: Read = "first",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: StartMethod = "popen",
        check_environment: EnvironmentCheck = "warn",
    ) -> None:
        super().__init__(
            PipelineConfig(),
            ShardConfig(),
            TensorConfig(plan, sequence_parallel, loss_parallel),
            meta_init,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout_s=timeout_s,
            start_method=start_method,
            check_environment=check_environment,
            save_full=save_full,
            async_save=async_save,
            read=read,
        )
        self._tp_size = tp_size

    @override
    def mesh_shape(self, world_size: int) -> MeshShape:
        size = fill_axis(world_size, "tp_size", self._tp_size)
        return MeshShape(dp_replicate=world_size // size, tp=size)
