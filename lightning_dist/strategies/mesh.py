"""Several parallelisms at once: stages x replicas x shards x tensor-parallel ranks.

The strategy takes the arguments of ``FSDPStrategy`` and ``TensorParallelStrategy``, those of
``PipelineStrategy`` with a synchronous schedule, and those of ``DDPStrategy`` on averaged weights.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, Unpack

import lightning.pytorch as pl
from lightning.fabric.utilities import rank_zero_info
from typing_extensions import override

from lightning_dist.engine.common.mesh_shape import MeshShape, fill_mesh
from lightning_dist.engine.common.names import check_count
from lightning_dist.engine.data_parallel.local_config import LocalConfig
from lightning_dist.engine.parallelize.rank_table import gather_rank_table
from lightning_dist.engine.parallelize.shard_config import ShardConfig
from lightning_dist.engine.pipeline.measurements import MeasuredStages, gather_measurements
from lightning_dist.engine.planning.dry_run_report import DryRunSummary
from lightning_dist.engine.planning.search.layout import Layout
from lightning_dist.engine.planning.search.plan import Plan
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from lightning_dist.strategies.base.distributed import RunArguments
from lightning_dist.strategies.mesh_runtime import checks
from lightning_dist.strategies.mesh_runtime.sharded import ShardedStrategy


def mesh_arguments(layout: Layout, *, find_unused_parameters: bool = False) -> dict[str, Any]:
    """Returns the arguments of :class:`MeshStrategy` for a layout."""
    pipeline = PipelineConfig(layers=layout.layers)
    if layout.mesh.pp > 1:
        pipeline = replace(
            pipeline,
            schedule=layout.schedule,
            num_microbatches=layout.num_microbatches,
            stages_per_rank=layout.stages_per_rank,
            partition=list(layout.partition),
        )
    again = "full" if layout.recomputes else "none"
    return {
        **layout.mesh.sizes,
        "pipeline": pipeline,
        "shard": ShardConfig(
            activation_checkpointing=again, find_unused_parameters=find_unused_parameters
        ),
    }


class MeshStrategy(MeasuredStages, ShardedStrategy):
    """Trains a model on a mesh of ranks.

    Ranks are numbered with ``tp`` innermost, then ``dp_shard``, ``dp_replicate`` and ``pp``.

    Args:
        pp: Number of stages of a pipeline.
        dp_replicate: Number of replicas of the model.
        dp_shard: Number of ranks that share a replica's parameters; ``"auto"`` takes the rest.
        tp: Number of ranks that share each layer.
        pipeline: As for :class:`~lightning_dist.PipelineStrategy`, with a synchronous schedule.
        shard: As for :class:`~lightning_dist.FSDPStrategy`.
        tensor: As for :class:`~lightning_dist.TensorParallelStrategy`.
        local: As ``sync_every``, ``outer`` and so on of :class:`~lightning_dist.DDPStrategy`: each
            replica, its shards and stages, steps by itself, and averages its weights with the other
            ones now and then.
        meta_init: Whether ``configure_model`` builds without memory, to be filled part by part.
        arguments: Those of all strategies, see :class:`.RunArguments`.

    Raises:
        ValueError: An argument is unknown, or does not go with another.
    """

    def __init__(
        self,
        pp: int = 1,
        dp_replicate: int = 1,
        dp_shard: int | Literal["auto"] = "auto",
        tp: int = 1,
        pipeline: PipelineConfig = PipelineConfig(),  # noqa: B008  (it is frozen)
        shard: ShardConfig = ShardConfig(),  # noqa: B008
        tensor: TensorConfig = TensorConfig(),  # noqa: B008
        local: LocalConfig = LocalConfig(),  # noqa: B008
        meta_init: bool = True,
        **arguments: Unpack[RunArguments],
    ) -> None:
        self._sizes = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp}
        checks.check_mesh(self._sizes, pipeline, shard, local)
        super().__init__(pipeline, shard, tensor, meta_init, local, **arguments)

    @classmethod
    def from_plan(
        cls, plan: Plan | str | Path, *, find_unused_parameters: bool = False, **arguments: Any
    ) -> Self:
        """Creates the strategy of a plan.

        Args:
            plan: A plan of :func:`lightning_dist.plan`, or the path of its YAML file.
            find_unused_parameters: As for :class:`~lightning_dist.FSDPStrategy`.
            arguments: Other arguments of the strategy, ``timeout_s`` for example.

        Raises:
            ValueError: The file holds no plan, or an argument is one of the plan's.
        """
        found = plan if isinstance(plan, Plan) else Plan.load(plan)
        planned = mesh_arguments(found.layout, find_unused_parameters=find_unused_parameters)
        if both := sorted(planned.keys() & arguments.keys()):
            raise ValueError(f"The plan has {both} already. Leave them out, or use MeshStrategy().")
        return cls(**planned, **arguments)

    @override
    def replicates(self, shape: MeshShape) -> bool:
        # Offloaded, even a rank by itself has something to gather.
        is_sharded = self._shard_config.offload != "none" or self._shard_config.policy.is_manual
        return shape.has_whole_layers and not is_sharded

    @override
    def end_training(self) -> None:
        super().end_training()
        session = self.sharded.session
        if session is not None:
            self._measurements = gather_measurements(session.pipeline, self.world_group, self.mesh)

    @override
    def print_summary(self) -> None:
        super().print_summary()
        table = gather_rank_table(self.module, self.mesh, self.sharded.layers, self.world_group)
        if table.num_hosts > 1:
            rank_zero_info(str(table))

    @override
    def mesh_shape(self, world_size: int) -> MeshShape:
        shape = fill_mesh(world_size, **self._sizes)
        checks.check_reshard(self._shard_config.reshard_after_forward, shape.dp_shard)
        offload = self._shard_config.offload
        if offload != "none" and shape.data_size == 1 and shape.world_size > 1:
            raise ValueError(
                f"offload={offload!r} keeps shards in host memory, and with dp_replicate=1 x"
                " dp_shard=1 nothing is sharded. Use dp_shard=2 or more, or leave offload out."
            )
        return shape

    def dry_run(
        self,
        module: pl.LightningModule,
        world_size: int,
        *,
        sample_batch: Any,
        optimizer_states_per_parameter: int = 2,
    ) -> DryRunSummary:
        """Predicts the memory and traffic of each rank in a training step, in a single process.

        The step runs on tensors without values, on one rank of each place in a pipeline; weights
        take no memory. :mod:`.mesh_runtime.dry.run` says what is counted. The precision is that of
        ``precision_plugin``, or, once a Trainer has been built with this strategy, the Trainer's.

        Args:
            module: The module, as for ``trainer.fit``; not changed. It is built by
                ``configure_model``, or is there already, on the meta device or not.
            world_size: Number of all ranks.
            sample_batch: A loader's batch for one rank, maybe on the meta device.
            optimizer_states_per_parameter: Tensors of a parameter's size and dtype that the
                optimizer keeps: 2 for AdamW, 1 for momentum, 0 for plain SGD.

        Returns:
            A row for each kind of rank; as text, two tables.

        Raises:
            ValueError: The sizes do not multiply to the world size, the module cannot be made
                parallel so, its step needs the values of tensors, or this process is a rank
                already.
        """
        # Here, for it imports torch's tools for debugging, which only a dry run needs.
        from lightning_dist.strategies.mesh_runtime.dry.run import DryRun

        check_count("world_size", world_size)
        shape = self.mesh_shape(world_size)
        states = optimizer_states_per_parameter
        check_count("optimizer_states_per_parameter", states, at_least=0)
        if self._shard_config.policy.is_manual:
            raise ValueError(
                "wrap='manual': `configure_model` shards on a mesh of real processes, of which a"
                " dry run has none. Use wrap='auto', or another policy."
            )
        checks.check_precision(str(self.precision_plugin.precision), shape.tp)
        averages = self.replicates(shape) and not self._local_config.averages_weights
        return DryRun(
            shape,
            self.parallelism(shape),
            self.precision_plugin,
            sample_batch,
            states,
            averaged_axes=("dp_replicate",) if averages else (),
        ).run(module)
