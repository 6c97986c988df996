"""Base of the strategies that shard the parameters of a model: over data or tensor ranks, or both.

The steps run inside of one :class:`.ShardedModule`, which
has composed the parallelisms. This class is the side of Lightning's loop: a model that is built
without memory, exact clipping, gradients that are reduced once for each update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.engine.common.device_mesh import axis
from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.data_parallel.checks import check_gradients
from lightning_dist.engine.data_parallel.replicas import broadcast_state
from lightning_dist.engine.parallelize.clip_grad import clip_grad_norm_
from lightning_dist.engine.parallelize.composition import Parallelism, parallelize
from lightning_dist.engine.parallelize.mixed_tensors import update_mixed_groups_singly
from lightning_dist.engine.parallelize.shard_config import ShardConfig
from lightning_dist.engine.parallelize.used_parts import UsedParts
from lightning_dist.engine.pipeline.measurements import predict_memory
from lightning_dist.engine.planning.memory import RankMemory, TrainedPart, sharded
from lightning_dist.engine.sharding.deferred_model import DeferredModel
from lightning_dist.engine.sharding.early_optimizers import EarlyParameters
from lightning_dist.engine.sharding.wrap_summary import WrapSummary
from lightning_dist.engine.splitting.batch_statistics import (
    find_batch_statistics,
    with_whole_batches,
)
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from lightning_dist.engine.tensor_parallel.summary import TensorSummary
from lightning_dist.engine.tensors.dtensor import is_spread
from lightning_dist.engine.tensors.patch import replace_method
from lightning_dist.engine.tensors.rng import first_ranks_numbers
from lightning_dist.strategies.base.callback_order import add_first_callback
from lightning_dist.strategies.base.clipping import ClipGradNorm
from lightning_dist.strategies.base.loaders.lengths import check_evaluation_lengths
from lightning_dist.strategies.base.metrics import reduce_metrics_over
from lightning_dist.strategies.base.model_checks import (
    check_callbacks,
    check_finetuning,
    check_group_values,
    check_optimizers,
    check_sharded_optimizers,
)
from lightning_dist.strategies.base.precision_plugin import half_precision_of, param_dtype_of
from lightning_dist.strategies.base.rank_view import RankView
from lightning_dist.strategies.mesh_runtime import checks as checks
from lightning_dist.strategies.mesh_runtime import data_parallel_checks
from lightning_dist.strategies.mesh_runtime.checks import check_precision
from lightning_dist.strategies.mesh_runtime.data_parallel import DataParallelStrategy
from lightning_dist.strategies.mesh_runtime.kept_sharding import (
    KeptSharding,
    Layout,
    find_sharding,
    keep_sharding,
)
from lightning_dist.strategies.mesh_runtime.sharded_module import ShardedModule
from lightning_dist.strategies.mesh_runtime.staged_module import StagedModule
from lightning_dist.strategies.pipelining.checks import check_trainer, one_optimizer
from lightning_dist.strategies.pipelining.session import run_context


class ShardedStrategy(DataParallelStrategy):
    """Base class; see the module's docstring.

    Args:
        pipeline: How the model is cut into stages, if the mesh has several.
        shard: How the parameters are spread over the data axes.
        tensor: How layers are spread over the tensor-parallel ranks.
        meta_init: Whether ``configure_model`` builds without memory, to be filled part by part.
        arguments: Arguments of :class:`.DistributedStrategy`.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        shard: ShardConfig,
        tensor: TensorConfig,
        meta_init: bool,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self._pipeline_config = pipeline
        self._shard_config = shard
        self._tensor_config = tensor
        self._policy = shard.policy
        self._meta_init = meta_init
        self._deferred = DeferredModel()
        self._sharded: ShardedModule | None = None
        self._is_accumulating = False
        self._hook_check: checks.HookCheck | None = None

    @property
    def device_mesh(self) -> DeviceMesh:
        """Torch's mesh of the data axes, with ``dp_shard`` behind ``dp_replicate`` if there is one.

        A ``configure_model`` that calls ``fully_shard`` itself needs it (``wrap="manual"``).
        """
        mesh = axis(self.mesh_of_ranks, "dp_replicate", "dp_shard")
        assert mesh is not None, "there is one replica, and nothing is sharded"
        return mesh

    def describe(self) -> WrapSummary | TensorSummary:
        """Describes how the model is spread: which modules are units, or a rank's shards of layers.

        The description exists once a run has been set up. As text, it is the plan that was found,
        and a table.

        Raises:
            ValueError: No run has been set up.
        """
        if self._sharded is None:
            raise ValueError(
                "describe() tells how a model has been spread, and no run has been set up yet. Call"
                " it in a hook from on_fit_start on, or after the run; `MeshStrategy.dry_run` needs"
                " none."
            )
        return self.sharded.tensor_summary or self.sharded.summary

    @override
    def view(self) -> RankView:
        view = super().view()
        if not isinstance(self._sharded, StagedModule):
            return replace(view, has_stages=self.mesh.pp > 1)
        pipeline = self._sharded.session.pipeline
        return replace(view, has_stages=True, pipeline=pipeline, recorder=pipeline.recorder)

    @override
    def predict_memory(self, part: TrainedPart, accumulates: bool) -> RankMemory | None:
        if self.mesh.tp > 1 or (self.mesh.pp > 1 and self.mesh.dp_shard > 1):
            return None
        if isinstance(self._sharded, StagedModule):
            return predict_memory(self._sharded.session.pipeline, part)
        summary = self.sharded.summary
        largest = max(row.num_bytes for row in summary.rows)
        whole = replace(part, parameter_bytes=summary.num_bytes)
        return sharded(whole, self.mesh.dp_shard, summary.peak_whole_bytes, largest)

    @override
    def print_summary(self) -> None:
        """Prints how the model is spread, on rank 0. Collective: every rank must call it."""
        if self.mesh.pp == 1 or self.mesh.dp_shard * self.mesh.tp > 1:
            rank_zero_info(self.sharded.layout_line(self.mesh, is_manual=self._policy.is_manual))
        if self.mesh.pp == 1:  # with stages, the first batch tells
            self.explain_batch_statistics()
        found = self.sharded.plan
        if found is not None and found.largest:
            rank_zero_info(found.largest)

    # --- the model ---------------------------------------------------------------------------

    @override
    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Builds modules of ``configure_model`` without memory, with rank 0's random numbers."""
        with first_ranks_numbers(self.group(*self.mesh.sizes)):
            if self._policy.is_manual or not self._meta_init:
                yield
                return
            with self._deferred.building():
                yield

    @override
    def check_run(self, trainer: pl.Trainer) -> None:
        check_precision(str(self.precision_plugin.precision), self.mesh.tp)
        if half_precision_of(self.precision_plugin) is not None:
            checks.check_half_precision(self.module, self._policy.is_manual)
        if not self.is_fitting:
            return
        check_callbacks(trainer)
        if self.mesh.tp > 1:
            check_finetuning(trainer)
        if self.mesh.pp > 1:
            check_trainer(trainer, self.module, self._pipeline_config, self.mesh.pp)

    @override
    def place_model(self, trainer: pl.Trainer) -> None:
        if self._sharded is None or self._sharded.module is not self.module:
            self._sharded = self._taken_over(self.is_fitting) or self._shard()
        if self.is_fitting:
            checks.check_optimization(self.module, self.sharded.is_manual)
        self.model_to_device()  # an earlier run has left it on the host

    @override
    def connect_loops(self, trainer: pl.Trainer) -> None:
        super().connect_loops(trainer)
        if self.num_readers > 1:
            tied = self.mesh.groups("pp", "dp_shard", "tp")
            everyone = self.group(*self.mesh.sizes)
            self._undo += (check_evaluation_lengths(trainer, tied, everyone),)
        if self.mesh.pp == 1:  # those of stages are reduced over the last ones
            self._undo += (reduce_metrics_over(self.module, self.data_group),)
        if self.is_fitting and self.sharded.is_sharded:
            reduces_each = self._shard_config.sync_every_microstep
            self._hook_check = checks.HookCheck(self.module, reduces_each=reduces_each)

    @override
    def whole_structure(self, device: torch.device | None = None) -> AbstractContextManager[None]:
        return self.sharded.whole_structure(device)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        with one_optimizer() if self.mesh.pp > 1 else nullcontext():
            super().setup_optimizers(trainer)
        check_optimizers(self.optimizers)
        if self.sharded.early is not None:
            self.sharded.early.replace_in(self.optimizers)

    @override
    def keep_own_parameters(self) -> None:
        for optimizer in self.optimizers:
            self.sharded.keep_own_parameters(optimizer)
            update_mixed_groups_singly(optimizer)
        check_sharded_optimizers(self.optimizers, self.group(*self.mesh.sizes))

    @override
    def gradient_clipping(self, trainer: pl.Trainer) -> ClipGradNorm:
        stages = self.group("pp") if self.mesh.pp > 1 else None

        def clip(parameters: list[Tensor], max_norm: float) -> Tensor:
            exclude = self.sharded.counted_elsewhere()
            return clip_grad_norm_(parameters, max_norm, pp_group=stages, exclude=exclude)

        return clip

    @override
    def open_session(self, trainer: pl.Trainer) -> None:
        half = half_precision_of(self.precision_plugin)
        if half is not None and self.sharded.is_sharded:
            half.leave_to_shards()
        if self.mesh.pp > 1:
            self.sharded.open(run_context(self, self._complete_gradients))
            assert isinstance(self.sharded, StagedModule)
            line = self.sharded.start_line(self.mesh)
            self._undo += (add_first_callback(trainer, line),)

    @property
    def _layout(self) -> Layout:
        asked = self.parallelism(self.mesh)
        return Layout(
            self.mesh,
            asked.pipeline,
            asked.tensor,
            self._shard_config,
            str(self.precision_plugin.precision),
            asked.half,
            sync_batchnorm=self._layer_sync is not None,
        )

    def _taken_over(self, is_fitting: bool) -> ShardedModule | None:
        """Returns the module as an earlier Trainer has sharded it; None if none has."""
        layout = self._layout if is_fitting else replace(self._layout, sync_batchnorm=None)
        sharded = find_sharding(self.module, layout, self.mesh_of_ranks)
        half = half_precision_of(self.precision_plugin)
        if sharded is not None and half is not None:
            half.convert_module(self.module)  # which it is already; it learns of the module
        return sharded

    def _shard(self) -> ShardedModule:
        everyone = self.group(*self.mesh.sizes)
        data_parallel_checks.check_module(self.module, everyone)
        checks.check_shardable(self.module, self._policy.is_manual)
        if self.mesh.pp > 1 or self.mesh.tp > 1:
            checks.check_automatic(self.module)
        # On a mesh, FSDP2 wraps replicas too, as one shard each, and a single rank as well.
        if axis(self.mesh_of_ranks, "dp_replicate", "dp_shard") is not None:
            checks.check_hooks(self.module)
        early = EarlyParameters(self.module)
        self._deferred.look_at(self.module)
        self.model = self.precision_plugin.convert_module(self.module)
        self.synchronise_layers()
        state = [*self.module.parameters(), *self.module.buffers()]
        broadcast_state([t for t in state if not t.is_meta and not is_spread(t)], everyone)
        sharded = self._composed()
        self._deferred.fill(self.module, self.root_device)
        sharded.tie_again()
        early.forget_present()
        sharded.early = early
        keep_sharding(KeptSharding(sharded, self._layout, self.mesh_of_ranks))
        return sharded

    @override
    def model_to_device(self) -> None:
        self.sharded.move(self.root_device, offloaded=self._shard_config.offload == "cpu")

    def parallelism(self, shape: MeshShape) -> Parallelism:
        """Returns the parallelism that the arguments and the precision ask for.

        Args:
            shape: The mesh of all ranks.
        """
        plugin = half_precision_of(self.precision_plugin)
        return Parallelism(
            self._pipeline_config if shape.pp > 1 else None,
            self._tensor_config,
            self._shard_config,
            self._shard_config.options(param_dtype_of(self.precision_plugin)),
            None if plugin is None else plugin.half,
        )

    def _composed(self) -> ShardedModule:
        config, statistics = self._pipeline_config, tuple[str, ...]()
        is_manual = not self.module.automatic_optimization
        asked = replace(self.parallelism(self.mesh), is_manual=is_manual)
        if self.mesh.pp > 1:
            statistics = find_batch_statistics(self.module)
            config = with_whole_batches(config, self.mesh.pp) if statistics else config
            asked = replace(asked, pipeline=config)
        composed = parallelize(self.module, self.mesh_of_ranks, asked)
        used = UsedParts(
            composed,
            (self.stage_group, self.group("dp_shard", "tp")),
            always=self._shard_config.find_unused_parameters,
        )
        if composed.split is None:
            return ShardedModule(composed, used)
        return StagedModule(composed, used, config, statistics)

    @property
    def sharded(self) -> ShardedModule:
        """The user's module as it is spread; exists once a run has been set up."""
        assert self._sharded is not None, "the model has not been sharded yet"
        return self._sharded

    @override
    def drain(self) -> None:
        """Broadcasts the first replica's buffers (running statistics) to the other replicas.

        Collective: every rank must call it. Validation, checkpoints and the end of training call it
        by themselves.
        """
        self.check_peers()
        if self._sharded is not None and self.is_running:
            self._sharded.run_deferred_checks()
            self._sharded.reshard()
            self.share_buffers()

    @override
    def before_validation(self) -> None:
        super().before_validation()
        self._check_group_values()

    @override
    def end_training(self) -> None:
        super().end_training()
        self._check_group_values()

    def _check_group_values(self) -> None:
        if self.is_running:
            check_group_values(self.optimizers, self.group(*self.mesh.sizes))

    @override
    def close_session(self) -> None:
        super().close_session()
        self._hook_check = None
        if self._sharded is not None:
            self._sharded.close(failed=not self.is_running)

    @override
    def interrupt(self, error: BaseException) -> None:
        if self._sharded is not None:
            self._sharded.interrupt(error)

    # --- checkpoints -------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = super().lightning_module_state_dict()
        return state if self._sharded is None else self._sharded.own_state(state)

    @override
    def foreign_names(self) -> set[str]:
        return self.sharded.foreign_names()

    # --- how a run ends ----------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        module = self.lightning_module
        tensors = [] if module is None else [*module.parameters(), *module.buffers()]
        if module is None or (self.is_running and not any(t.is_meta for t in tensors)):
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

    # --- steps -------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.seed_data_rank(reading=False)
        context = self.precision_plugin.train_step_context
        return self.sharded.train(self.module.training_step, context, *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        context = self.precision_plugin.val_step_context
        return self.sharded.evaluate(self.module.validation_step, context, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        context = self.precision_plugin.test_step_context
        return self.sharded.evaluate(self.module.test_step, context, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        context = self.precision_plugin.predict_step_context
        return self.sharded.evaluate(self.module.predict_step, context, *args, **kwargs)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        def default() -> Tensor:
            return super(ShardedStrategy, self).backward(closure_loss, optimizer, *args, **kwargs)

        if self._hook_check is not None:
            self._hook_check.check(accumulating=self._is_accumulating)
        return self.sharded.backward(closure_loss, default, accumulating=self._is_accumulating)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        def apply() -> Any:
            return super(ShardedStrategy, self).optimizer_step(optimizer, closure, model, **kwargs)

        result = self.sharded.update(optimizer, closure, apply)
        self.sharded.end_check()  # a backward in two halves has not ended the check
        return result

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        if not self._is_accumulating:
            self._complete_gradients()

    def _complete_gradients(self) -> None:
        self.sharded.add_gradients()
        without = self.sharded.without_gradient()
        is_usual = self._shard_config.find_unused_parameters or self.sharded.is_manual
        if is_usual or self.world_size == 1:
            self.sharded.forget_gradients(without)
        else:
            check_gradients(without)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        if self.sharded.is_manual:  # a step may look at gradients, or drop them, at any time
            yield
            return
        stays = nullcontext() if self._shard_config.sync_every_microstep else self.sharded.no_sync()
        self._is_accumulating = True
        try:
            with stays:
                yield
        finally:
            self._is_accumulating = False
