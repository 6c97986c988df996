"""The parallelisms that a user asks for, as :func:`.parallelize` takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_dist.engine.common.mesh_shape import DATA_AXES
from lightning_dist.engine.data_parallel.wrapped_replica import ReplicaOptions
from lightning_dist.engine.parallelize.shard_config import ShardConfig
from lightning_dist.engine.precision.policy import HalfPrecision
from lightning_dist.engine.sharding.fully_shard import ShardingOptions
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.splitting.tracing.example import CallExample
from lightning_dist.engine.tensor_parallel.config import TensorConfig


@dataclass(frozen=True)
class Parallelism:
    """The parallelisms that a user asks for.

    Attributes:
        pipeline: How the model is cut into stages; None for no stages.
        tensor: How tensor parallelism shards the layers.
        shard: How FSDP shards the parameters over the data axes; None leaves them whole, and the
            cut to :class:`.Pipeline`, so that an optimizer can first see the whole model.
        sharding: FSDP's options, from ``shard`` and the precision.
        half: The modules that compute in half precision, from ``MixedPrecision``.
        is_manual: Whether a step calls backward and updates by itself.
        example: Sources of an example call, by which a model without layers is traced; None traces
            no model.
        joint_statistics: Modules whose statistics of the batch are those of all replicas' batches.
        data_axes: The axes of the mesh that FSDP shards over, or averages each step's gradients
            over; none, and ``shard`` only says which units compile and recompute.
        replicas: How whole replicas average their gradients; None averages none. A replica is on
            its device already, and equal on all ranks.
    """

    pipeline: PipelineConfig | None = None
    tensor: TensorConfig = field(default_factory=TensorConfig)
    shard: ShardConfig | None = field(default_factory=ShardConfig)
    sharding: ShardingOptions = field(default_factory=ShardingOptions)
    half: HalfPrecision | None = None
    is_manual: bool = False
    example: CallExample | None = None
    joint_statistics: Sequence[str] = ()
    data_axes: tuple[str, ...] = DATA_AXES
    replicas: ReplicaOptions | None = None

    @property
    def shards_parameters(self) -> bool:
        """Whether FSDP shards the parameters over the data axes."""
        return self.shard is not None and bool(self.data_axes)
