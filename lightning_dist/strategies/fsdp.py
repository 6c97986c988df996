"""Sharded data parallelism: each rank holds shards, and whole units only while they compute.

FSDP2 does the work: parameters, gradients and optimizer state are ``DTensor`` shards, and a unit's
parameters are gathered for its forward and backward. Beyond FSDP2 and Lightning's own strategy,
this one has policies that choose the units, accumulation that does not send, and exact clipping.
Models larger than one rank begin with the weights of a single device, and every other layout reads
the checkpoints.
"""

from __future__ import annotations

from typing import Literal, Unpack

from typing_extensions import override

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
from lightning_dist.strategies.base.distributed import RunArguments
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
            backward, for memory: between micro-steps a rank holds a shard of them, not all. So it
            is in any case where ``on_after_backward`` is overridden, which sees them.
        meta_init: Whether ``configure_model`` builds without memory, to be filled shard by shard.
        compile: Whether to compile the units' forwards with ``torch.compile``; of nested units,
            those that have no other inside.
        find_unused_parameters: Whether to allow steps that do not use all parameters on any rank,
            which are an error otherwise. A parameter that only some ranks leave out counts as zero
            there, with this option or without (since torch 2.13). All ranks must run the same units
            in a step. Ranks compare before each unit in the first few steps, and after each later
            step; with this option before each unit in all steps.
        arguments: Those of all strategies, see :class:`.RunArguments`.

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
        **arguments: Unpack[RunArguments],
    ) -> None:
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
            **arguments,
        )
        self._shard_size = shard_size

    @override
    def mesh_shape(self, world_size: int) -> MeshShape:
        size = fill_axis(world_size, "shard_size", self._shard_size)
        checks.check_reshard(self._shard_config.reshard_after_forward, size)
        return MeshShape(dp_replicate=world_size // size, dp_shard=size)
