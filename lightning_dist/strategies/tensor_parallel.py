"""Tensor parallelism: each layer's weights, and the work with them, sharded over ranks.

The user's own layers are cut as Megatron-LM cuts its layers by hand. A projection is cut by its
output features, the next one by its input features. Between the two each rank has a shard of the
features. :mod:`.engine.tensor_parallel` has the parts; the user's steps see plain, whole tensors.
"""

from __future__ import annotations

from typing import Literal, Unpack

from typing_extensions import override

from lightning_dist.engine.common.mesh_shape import MeshShape, fill_axis
from lightning_dist.engine.parallelize.shard_config import ShardConfig
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from lightning_dist.strategies.base.distributed import RunArguments
from lightning_dist.strategies.mesh_runtime.sharded import ShardedStrategy


class TensorParallelStrategy(ShardedStrategy):
    """Shards a model's layers over ranks, and trains replicas of it if there are more.

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
        arguments: Those of all strategies, see :class:`.RunArguments`.

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
        **arguments: Unpack[RunArguments],
    ) -> None:
        super().__init__(
            PipelineConfig(),
            ShardConfig(),
            TensorConfig(plan, sequence_parallel, loss_parallel),
            meta_init,
            **arguments,
        )
        self._tp_size = tp_size

    @override
    def mesh_shape(self, world_size: int) -> MeshShape:
        size = fill_axis(world_size, "tp_size", self._tp_size)
        return MeshShape(dp_replicate=world_size // size, tp=size)
