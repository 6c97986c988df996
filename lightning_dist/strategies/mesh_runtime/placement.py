"""Where the parts of a sharded model are: which rank has them, on which device.

A module is built without memory if it can be, put together by :func:`.parallelize`, and filled part
by part. A later Trainer takes over what an earlier one has sharded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities import rank_zero_info
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_dist.engine.common.device_mesh import axis
from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.data_parallel.local_config import LocalConfig
from lightning_dist.engine.data_parallel.replicas import broadcast_state
from lightning_dist.engine.parallelize.composition import parallelize
from lightning_dist.engine.parallelize.parallelism import Parallelism
from lightning_dist.engine.parallelize.shard_config import ShardConfig
from lightning_dist.engine.pipeline.measurements import predict_memory
from lightning_dist.engine.planning.memory import RankMemory, TrainedPart, replicated, sharded
from lightning_dist.engine.sharding.deferred_init.api import DeferredModel
from lightning_dist.engine.sharding.early_optimizers import EarlyParameters
from lightning_dist.engine.sharding.unit_agreement import UnitAgreement
from lightning_dist.engine.sharding.unused_parameters import UnusedParameters
from lightning_dist.engine.sharding.wrap_summary import WrapSummary
from lightning_dist.engine.splitting.config import PipelineConfig, with_whole_batches
from lightning_dist.engine.splitting.split import PipelineSplit
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from lightning_dist.engine.tensor_parallel.summary import TensorSummary
from lightning_dist.engine.tensors.dtensor import crashes_in_gathers, is_dtensor
from lightning_dist.engine.tensors.patch import replace_method, user_state_kept
from lightning_dist.strategies.base.ending.brief_errors import brief_mistakes
from lightning_dist.strategies.base.precision_plugin import half_precision_of, param_dtype_of
from lightning_dist.strategies.base.rank_view import RankView
from lightning_dist.strategies.mesh_runtime import checks, replica_checks
from lightning_dist.strategies.mesh_runtime.first_call import TracesModels
from lightning_dist.strategies.mesh_runtime.hook_check import check_hooks, check_same_hooks
from lightning_dist.strategies.mesh_runtime.kept_sharding import KeptSharding, find_sharding
from lightning_dist.strategies.mesh_runtime.layout_line import describe_rounds
from lightning_dist.strategies.mesh_runtime.local_replicas import LocalReplicas
from lightning_dist.strategies.mesh_runtime.sharded_module import ShardedModule
from lightning_dist.strategies.mesh_runtime.staged_module import StagedModule
from lightning_dist.strategies.pipelining.checks import find_statistics_of_all


class ShardedPlacement(TracesModels, LocalReplicas):
    """Base class; see the module's docstring."""

    def __init__(
        self,
        pipeline: PipelineConfig,
        shard: ShardConfig,
        tensor: TensorConfig,
        meta_init: bool,
        local: LocalConfig = LocalConfig(),  # noqa: B008  (it is frozen)
        **arguments: Any,
    ) -> None:
        super().__init__(local=local, **arguments)
        self._pipeline_config = pipeline
        self._shard_config = shard
        self._tensor_config = tensor
        self._meta_init = meta_init
        self._deferred = DeferredModel()
        self._sharded: ShardedModule | None = None

    @override
    def set_world_ranks(self) -> None:
        super().set_world_ranks()
        backend, device_type, size = self.device_backend, self.root_device.type, self.mesh.tp
        if size > 1 and crashes_in_gathers(backend, device_type):
            with brief_mistakes():
                raise ValueError(
                    f"process_group_backend={backend!r} with tp_size={size} on a {device_type!r}"
                    " device: torch crashes in gathers of DTensors there (pytorch#152645). Use"
                    " process_group_backend=None, or a strategy without tp."
                )

    def replicates(self, shape: MeshShape) -> bool:
        """Whether ranks of a mesh hold their layers whole, and FSDP has nothing to shard.

        FSDP2 would run there too, with one shard per replica. But its copies, and optimizers on
        DTensors, take time and memory that whole parameters do not: on two CPU ranks a quarter of
        a GPT's step.
        """
        return False

    @property
    def is_replica(self) -> bool:
        """Whether this rank has the whole module as it is."""
        return self.replicates(self.mesh) and self.mesh.pp == 1

    @property
    def is_manual(self) -> bool:
        """Whether steps may call backward and update by themselves."""
        return not self.module.automatic_optimization if self.is_replica else self.sharded.is_manual

    @property
    def device_mesh(self) -> DeviceMesh:
        """Torch's mesh of the data axes, with ``dp_shard`` behind ``dp_replicate`` if there is one.

        Replicas that step by themselves have only the former.
        A ``configure_model`` that calls ``fully_shard`` itself needs it (``wrap="manual"``).
        """
        mesh = axis(self.mesh_of_ranks, *self.gradient_axes)
        assert mesh is not None, "there is one replica, and nothing is sharded"
        return mesh

    def describe(self) -> WrapSummary | TensorSummary:
        """Describes how the model is sharded: the FSDP units, or a rank's shards of layers.

        The description exists once a run has been set up. As text, it is the plan that was found,
        and a table.

        Raises:
            ValueError: No run has been set up.
        """
        if self._sharded is None:
            raise ValueError(
                "describe() tells how a model has been sharded, and no run has been set up yet."
                " Call it in a hook from on_fit_start on, or after the run; `MeshStrategy.dry_run`"
                " needs none."
            )
        return self.sharded.tensor_summary or self.sharded.summary

    @override
    def view(self) -> RankView:
        session = None if self._sharded is None else self._sharded.session
        pipeline = None if session is None else session.pipeline
        return replace(super().view(), has_stages=self.mesh.pp > 1, pipeline=pipeline)

    @override
    def predict_memory(self, part: TrainedPart, accumulates: bool) -> RankMemory | None:
        if self.mesh.tp > 1 or (self.mesh.pp > 1 and self.mesh.dp_shard > 1):
            return None
        if self.sharded.session is not None:
            return predict_memory(self.sharded.session.pipeline, part)
        if self.replicates(self.mesh):
            return replicated(part, self.mesh.data_size, accumulates=accumulates)
        summary = self.sharded.summary
        largest = max(row.num_bytes for row in summary.rows)
        whole = replace(part, parameter_bytes=summary.num_bytes)
        return sharded(whole, self.mesh.dp_shard, summary.peak_whole_bytes, largest)

    @override
    def print_summary(self) -> None:
        """Prints how the model is sharded, on rank 0. Collective: every rank must call it."""
        if self.mesh.pp == 1 or self.mesh.dp_shard * self.mesh.tp > 1:
            rank_zero_info(
                self.sharded.layout_line(self.mesh, is_manual=self._shard_config.policy.is_manual)
            )
        if self._local_config.averages_weights:
            said = describe_rounds(self._local_config, "gradients averaged")
            rank_zero_info(f"{self.mesh.dp_replicate} replicas step by themselves: {said}.")
        if self.mesh.pp == 1:  # with stages, the first batch tells
            self.explain_batch_statistics()
        found = self.sharded.plan
        if found is not None and found.largest:
            rank_zero_info(found.largest)

    @override
    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Builds modules of ``configure_model`` without memory, with rank 0's random numbers."""
        defers = self._meta_init and not self._shard_config.policy.is_manual
        building = self._deferred.building() if defers else nullcontext()
        with super().model_sharded_context(), building:
            yield

    @override
    def place_model(self, trainer: pl.Trainer) -> None:
        if self._sharded is None or self._sharded.module is not self.module:
            self._sharded = self._taken_over() or self._shard(trainer)
        if self.is_fitting and not (self.is_manual or self.module.automatic_optimization):
            raise ValueError(
                "The module was sharded for automatic optimization, which is off now. Set it in"
                " `__init__`, or load a checkpoint into a new module."
            )
        self.model_to_device()  # an earlier run has left it on the host

    @property
    def _settings(self) -> dict[str, Any]:
        """The settings that Trainers must have in common to run one sharded module."""
        asked = self.parallelism(self.mesh)
        return {
            "mesh": self.mesh,
            "pipeline": asked.pipeline,
            "tensor": asked.tensor,
            "shard": self._shard_config,
            "data_axes": asked.data_axes,
            "precision": str(self.precision_plugin.precision),
            "mixed_precision": asked.half,
            "sync_batchnorm": self._layer_sync is not None,
        }

    def _taken_over(self) -> ShardedModule | None:
        """Returns the module as an earlier Trainer has sharded it; None if none has."""
        settings = self._settings
        if not self.is_fitting:
            del settings["sync_batchnorm"]  # it has no effect
        sharded = find_sharding(self.module, settings, self.mesh_of_ranks)
        half = half_precision_of(self.precision_plugin)
        if sharded is not None and half is not None:
            half.convert_module(self.module)  # which it is already; it learns of the module
        return sharded

    def _shard(self, trainer: pl.Trainer) -> ShardedModule:
        replica_checks.check_module(self.module, self.world_group)
        if self.replicates(self.mesh):
            replica_checks.check_whole(self.module)
        else:
            checks.check_shardable(self.module, self._shard_config.policy.is_manual)
            if self.has_units or self.mesh.tp > 1:
                check_same_hooks(self.module, self.world_group)
            if self.has_units:
                check_hooks(self.module)
        if self.mesh.pp > 1 or self.mesh.tp > 1:
            checks.check_automatic(self.module)
        early = EarlyParameters(self.module)
        self._deferred.look_at(self.module)
        self.model = self.precision_plugin.convert_module(self.module)
        self.synchronise_layers()
        state = [*self.module.parameters(), *self.module.buffers()]
        present = [t for t in state if not t.is_meta and not is_dtensor(t)]
        broadcast_state(present, self.device_group(*self.mesh.sizes))
        sharded = self._composed(trainer)
        is_offloaded = self._shard_config.offload == "cpu"
        self._deferred.fill(self.module, self.root_device, offloaded=is_offloaded)
        if isinstance(sharded, StagedModule):
            sharded.take_replaced()
        early.replace_in_attributes()
        early.forget_present()
        sharded.early = early
        KeptSharding(sharded, self._settings, self.mesh_of_ranks).keep()
        return sharded

    @property
    def has_units(self) -> bool:
        """Whether FSDP2 wraps the module; replicas of tensor-parallel layers are one shard each."""
        is_whole = self.replicates(self.mesh)
        return not is_whole and axis(self.mesh_of_ranks, *self.gradient_axes) is not None

    @override
    def model_to_device(self) -> None:
        self.sharded.move(self.root_device, offloaded=self._shard_config.offload == "cpu")

    def parallelism(self, shape: MeshShape) -> Parallelism:
        """Returns the parallelism that the arguments and the precision ask for."""
        plugin = half_precision_of(self.precision_plugin)
        return Parallelism(
            pipeline=self._pipeline_config if shape.pp > 1 else None,
            tensor=self._tensor_config,
            shard=self._shard_config,
            sharding=self._shard_config.options(param_dtype_of(self.precision_plugin)),
            data_axes=() if self.replicates(shape) else self.gradient_axes,
            half=None if plugin is None else plugin.half,
        )

    def _composed(self, trainer: pl.Trainer) -> ShardedModule:
        config, statistics = self._pipeline_config, tuple[str, ...]()
        asked = self.parallelism(self.mesh)
        if self.is_replica:
            return ShardedModule(parallelize(self.module, self.mesh_of_ranks, asked), None)
        asked = replace(asked, is_manual=not self.module.automatic_optimization)
        if self.mesh.pp > 1:
            statistics = find_statistics_of_all(self.module, self.world_group)
            config = with_whole_batches(config, self.mesh.pp) if statistics else config
            example = self.example_of_call(trainer, asked.half)
            joint = statistics if self._layer_sync is not None else ()
            asked = replace(asked, pipeline=config, example=example, joint_statistics=joint)
        composed = parallelize(self.module, self.mesh_of_ranks, asked)
        ties = () if composed.split is None else composed.split.ties
        if ties and self._local_config.fragments > 1:
            shared = [name for names in ties[0].names.values() for name in names]
            raise ValueError(
                f"fragments={self._local_config.fragments}: stages average fragments in their own"
                f" turns, in which copies of one parameter, {shared}, would differ. Use"
                " fragments=1."
            )
        if self.replicates(self.mesh):
            return StagedModule(composed, None, config, statistics)
        # Replicas that never average a gradient need not run the same units.
        meets = self._local_config.averages_gradients
        training_group = self.group(*self.stage_axes) if meets else self.group("dp_shard", "tp")
        units = UnitAgreement(
            self.module,
            composed.units,
            training_group,
            self.group("dp_shard", "tp"),
            always=self._shard_config.find_unused_parameters,
        )
        unused, roots = None, composed.shards
        if roots and UnusedParameters.are_supported_by(roots):
            unused = UnusedParameters(self.module, roots, composed.units, training_group)
        if composed.split is not None:
            return StagedModule(composed, units, config, statistics, unused)
        return ShardedModule(composed, units, unused)

    @property
    def sharded(self) -> ShardedModule:
        """The user's module as it is sharded; exists once a run has been set up."""
        assert self._sharded is not None, "the model has not been sharded yet"
        return self._sharded

    @property
    @override
    def split(self) -> PipelineSplit | None:
        return None if self._sharded is None else self._sharded.split

    @override
    def teardown(self) -> None:
        module = self.lightning_module
        tensors = [] if module is None else [*module.parameters(), *module.buffers()]
        if module is None or (self.is_running and not any(t.is_meta for t in tensors)):
            # Lightning moves the module to the CPU.
            with nullcontext() if module is None else user_state_kept(module):
                super().teardown()
            return
        # The run has failed: maybe before there were values, or in the middle of a step. Lightning
        # moves the module to the CPU, and an error in this must not replace the error that ended
        # the run.
        undo = replace_method(module, "cpu", lambda: module)
        try:
            super().teardown()
        finally:
            undo()
