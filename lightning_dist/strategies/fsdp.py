"""Sharded data parallelism: each rank holds shards, and whole units only while they compute.

FSDP2 does the work: parameters, gradients and optimizer state are ``DTensor`` shards, and a unit's
parameters are gathered for its forward and backward. Beyond FSDP2 and Lightning's own strategy,
this one has policies that choose the units, accumulation that does not send, and exact clipping.
Models larger than one rank begin with the weights of a single device, and every other layout reads
the checkpoints.
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
from lightning_dist.engine.parallelize.shard_config import (
    ActivationCheckpointing,
    Offload,
    ReduceDtype,
    ShardConfig,
    Sharded,
)
from lightning_dist.engine.sharding.wrap import WrapPolicy
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from lightning_dist.strategies.base.process_mesh import StartMethod
from lightning_dist.strategies.mesh_runtime import checks
from lightning_dist.strategies.mesh_runtime.sharded import ShardedStrategy


class FSDPStrategy(ShardedStrategy):
    """Trains one model, or a few replicas of it, sharded over many ranks.

    Args:
        wrap: Which modules become units: ``"auto"`` (the block that the model repeats),
            ``"manual"``, or a policy of :mod:`.sharding.wrap`.
        shard: What a rank holds a part of: ``"parameters"``, gradients and optimizer state
            (ZeRO-3), ``"gradients"`` and optimizer state (ZeRO-2), or ``"optimizer"`` state alone.
            The last two gather the parameters once per step and keep them for its backward, and are
            ``reshard_after_forward=False`` with ``sync_every_microstep=True`` and without.
        shard_size: Ranks that share one replica; fewer than all make several replicas (HSDP).
        reshard_after_forward: Whether to free gathered parameters between forward and backward, or
            the number of ranks to reshard them to. ``"auto"`` frees all but the root's.
        offload: ``"cpu"`` keeps shards, gradients and optimizer state in host memory.
        activation_checkpointing: Which units recompute their activations in the backward:
            ``"full"``, ``"selective"`` (recomputes all but matrix products and attention, and whole
            any part that is compiled inside of a unit), or a list of classes. If units are nested,
            the outermost recomputes, but for one that holds several of a kind.
        reduce_dtype: Dtype in which gradients are reduced, with ``precision="bf16-mixed"`` or
            ``"16-mixed"``, or with the callback ``MixedPrecision``.
        sync_every_microstep: With ``accumulate_grad_batches``, whether to reduce gradients in each
            backward, for memory: between micro-steps a rank holds a shard of them, not all.
        meta_init: Whether ``configure_model`` builds without memory, to be filled shard by shard.
        compile: Whether to compile the units' forwards with ``torch.compile``; of nested units,
            those that have no other inside.
        find_unused_parameters: Whether to allow steps that do not use all parameters on any rank,
            which are an error otherwise. A parameter that only some ranks leave out counts as zero
            there, with this option or without (since torch 2.13). All ranks must run the same units
            in a step. Ranks compare before each unit in the first few steps, and after each later
            step; with this option before each unit in all steps.
        compression: Only ``"none"``; other strategies have more.
        timeout_s: Seconds that a rank waits for another before it gives up.
        save_full: Whether to write one ordinary ``.ckpt`` file, or else a directory of shards. None
            writes the file if a rank holds the whole model.
        async_save: Whether a thread writes checkpoints, from a copy in host memory, while training
            goes on.
        accelerator, parallel_devices, cluster_environment: As for any Lightning strategy.
        checkpoint_io, precision_plugin: As for any Lightning strategy.
        process_group_backend: ``"gloo"`` or ``"nccl"``, for what is on the device; None takes the
            device's own. Control messages always go over gloo.
        start_method: Only ``"popen"``, which runs the script once per device.
        check_environment: What to do at the start if hosts have other versions, variables or
            scripts: ``"warn"``, ``"error"`` or ``"off"``.

    Raises:
        ValueError: An argument is unknown, or two arguments exclude each other.
    """

    def __init__(
        self,
        wrap: str | WrapPolicy = "auto",
        shard: Sharded = "parameters",
        shard_size: int | Literal["auto"] = "auto",
        reshard_after_forward: bool | int | Literal["auto"] = "auto",
        offload: Offload = "none",
        activation_checkpointing: ActivationCheckpointing | list[str] = "none",
        reduce_dtype: ReduceDtype = "float32",
        sync_every_microstep: bool = False,
        meta_init: bool = True,
        compile: bool = False,
        find_unused_parameters: bool = False,
        compression: Literal["none"] = "none",
        timeout_s: float = 1800.0,
        save_full: bool | None = None,
        async_save: bool = False,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: StartMethod = "popen",
        check_environment: EnvironmentCheck = "warn",
    ) -> None:
        checks.check_compression(compression)
        if checks.keeps_parameters(shard, reshard_after_forward, sync_every_microstep):
            reshard_after_forward = False
            sync_every_microstep = shard == "gradients"
        super().__init__(
            PipelineConfig(),
            ShardConfig(
                wrap=wrap,
                reshard_after_forward=reshard_after_forward,
                offload=offload,
                activation_checkpointing=activation_checkpointing,
                reduce_dtype=reduce_dtype,
                sync_every_microstep=sync_every_microstep,
                compile=compile,
                find_unused_parameters=find_unused_parameters,
            ),
            TensorConfig(),
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
        )
        self._shard_size = shard_size

    @override
    def mesh_shape(self, world_size: int) -> MeshShape:
        size = fill_axis(world_size, "shard_size", self._shard_size)
        checks.check_reshard(self._shard_config.reshard_after_forward, size)
        return MeshShape(dp_replicate=world_size // size, dp_shard=size)
