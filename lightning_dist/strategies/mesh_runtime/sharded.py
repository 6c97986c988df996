"""Base of the strategies that shard the parameters of a model: over data or tensor ranks, or both.

The steps run inside of one :class:`.ShardedModule`. This class is the side of Lightning's loop:
exact clipping, and gradients that are reduced once for each update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.engine.checkpoint.optimizer_state import keep_own_parameters
from lightning_dist.engine.data_parallel.missing_gradients import check_gradients
from lightning_dist.engine.data_parallel.replicas import average_gradients
from lightning_dist.engine.data_parallel.wrapped_replica import WrappedReplica
from lightning_dist.engine.parallelize.clip_grad import clip_grad_norm_
from lightning_dist.engine.parallelize.mixed_tensors import note_shard_errors, split_groups_by_mesh
from lightning_dist.engine.parallelize.separate_updates import check_separate_updates
from lightning_dist.engine.sharding.fully_shard import is_left_whole
from lightning_dist.engine.tensors.dtensor import take_whole_numbers
from lightning_dist.strategies.base import lightning_internals
from lightning_dist.strategies.base.callback_order import is_overridden_by_user
from lightning_dist.strategies.base.clipping import ClipGradNorm, norms_of_whole_gradient
from lightning_dist.strategies.base.metrics import reduce_metrics_over
from lightning_dist.strategies.base.model_checks import (
    check_callbacks,
    check_dense_gradients,
    check_finetuning,
    check_optimizers,
    check_sharded_optimizers,
)
from lightning_dist.strategies.base.precision_plugin import half_precision_of, param_dtype_of
from lightning_dist.strategies.base.run_setup import Closure, Step, StepContext
from lightning_dist.strategies.mesh_runtime import checks
from lightning_dist.strategies.mesh_runtime.hook_check import HookCheck
from lightning_dist.strategies.mesh_runtime.placement import ShardedPlacement
from lightning_dist.strategies.mesh_runtime.staged_module import StagedModule
from lightning_dist.strategies.pipelining.checks import (
    check_saved_names,
    check_trainer,
    one_optimizer,
)


class ShardedStrategy(ShardedPlacement):
    """Base class; see the module's docstring."""

    _is_accumulating = False
    _reduces_each = False
    _hook_check: HookCheck | None = None

    # --- the model ---------------------------------------------------------------------------

    @override
    def check_run(self, trainer: pl.Trainer) -> None:
        checks.check_precision(str(self.precision_plugin.precision), self.mesh.tp)
        is_half = half_precision_of(self.precision_plugin) is not None
        if is_half and not self.replicates(self.mesh):
            checks.check_half_precision(
                self.module,
                is_manual=self._shard_config.policy.is_manual,
                has_stages=self.mesh.pp > 1,
            )
        if not self.is_fitting:
            return
        check_callbacks(trainer)
        if self.mesh.tp > 1:
            check_finetuning(trainer)
            checks.check_anomaly(lightning_internals.detects_anomalies(trainer), self.mesh.tp)
        if self.mesh.pp > 1:
            check_trainer(trainer, self.module, self._pipeline_config, self.mesh.pp)
        if self.has_units:
            check_dense_gradients(self.module, "FSDP2's units")
        averages = self._averages_gradients and self._local_config.averages_gradients
        if averages and self.mesh.data_size > 1:
            check_dense_gradients(self.module, "averages of replicas")

    @override
    def connect_loops(self, trainer: pl.Trainer) -> None:
        super().connect_loops(trainer)
        if self.mesh.pp == 1:  # those of stages are reduced over the last ones
            self._undo += (reduce_metrics_over(self.module.modules(), self.data_group),)
        self._reduces_each = self._shard_config.sync_every_microstep
        if self.is_fitting and self.sharded.is_sharded:
            # Such a hook may change the sum so far, of which no rank would have its part.
            self._reduces_each |= is_overridden_by_user(("on_after_backward",), self.module)
            self._hook_check = HookCheck(
                self.module, self.sharded.gathered, reduces_each=self._reduces_each
            )

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        with one_optimizer() if self.mesh.pp > 1 else nullcontext():
            super().setup_optimizers(trainer)
        check_optimizers(self.optimizers)
        if self.sharded.early is not None:
            self.sharded.early.replace_in(self.optimizers)

    @override
    def keep_own_part(self) -> None:
        if not self.is_fitting:
            return
        if self.split is not None:
            check_saved_names(self.module, self.split)
        for optimizer in self.optimizers if self.split is not None else ():
            if self.mesh.pp > 1:
                check_separate_updates(optimizer, "stage")
            keep_own_parameters(optimizer, self.module)
        check_sharded_optimizers(self.optimizers, self.world_group)

    @override
    def gradient_clipping(self, trainer: pl.Trainer) -> ClipGradNorm:
        def clip(parameters: list[Tensor], max_norm: float) -> Tensor:
            stages = self.device_group("pp") if self.mesh.pp > 1 else None
            session = self.sharded.session
            exclude = [] if session is None else session.counted_elsewhere
            return clip_grad_norm_(parameters, max_norm, pp_group=stages, exclude=exclude)

        return clip

    @override
    def open_session(self, trainer: pl.Trainer) -> None:
        if self._local_config.averages_weights:
            super().open_session(trainer)
        if self.sharded.is_sharded or self.mesh.tp > 1:
            self._undo += (take_whole_numbers(),)
        if self.is_fitting and self.mesh.tp > 1 and self.mesh.pp == 1:
            norms = ExitStack()
            norms.enter_context(norms_of_whole_gradient())
            self._undo += (norms.close,)
        half = half_precision_of(self.precision_plugin)
        if half is not None and self.sharded.is_sharded:
            half.leave_to_shards()
        if self.is_fitting and self.is_replica and self.world_size > 1:
            dtype = param_dtype_of(self.precision_plugin)
            exchange = self._shard_config.exchange(dtype, is_manual=self.is_manual)
            self._replica = WrappedReplica(self.module, self.replica_options(exchange))
        if self.mesh.pp > 1:
            assert isinstance(self.sharded, StagedModule)
            self.sharded.open(self, self._complete_gradients)

    @override
    def drain(self) -> None:
        """Averages local weights, and broadcasts the first replica's buffers. Collective."""
        self.check_peers()
        if self._sharded is not None and self.is_running:
            if self._sharded.units is not None:
                self._sharded.units.run_deferred_checks()
            self._sharded.reshard()
            if self._sharded.session is not None:
                self._sharded.session.step_state.merge()
            self.average_weights()
            self.share_buffers()

    @override
    def annotate(self, exception: BaseException) -> None:
        super().annotate(exception)
        note_shard_errors(exception)

    @override
    def close_session(self) -> None:
        super().close_session()
        self._hook_check = None
        if self._sharded is not None:
            self._sharded.close(failed=not self.is_running)

    @override
    def interrupt(self, error: BaseException) -> None:
        if self._sharded is not None and self._sharded.session is not None:
            self._sharded.session.channels.interrupt(error)

    # --- steps -------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        # Behind the hooks that freeze and unfreeze, ahead of all contexts of the step.
        first_of_update = batch_idx % self.module.trainer.accumulate_grad_batches == 0
        self.sharded.begin_batch(begins_update=first_of_update and not self.is_manual)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.seed_data_rank(reading=False)
        context, step = self.precision_plugin.train_step_context, self.module.training_step
        if self._replica is None:
            return self.sharded.train(step, context, *args, **kwargs)
        with context():
            return self._replica.run(step, *args, is_local=self.is_local, **kwargs)

    @override
    def evaluate(self, step: Step, context: StepContext, *args: Any, **kwargs: Any) -> Any:
        return self.sharded.evaluate(step, context, *args, **kwargs)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        default = partial(super().backward, closure_loss, optimizer, *args, **kwargs)
        if self._hook_check is not None:
            self._hook_check.check(accumulating=self._is_accumulating)
        if self.mesh.pp > 1:  # whose backwards have run in the step
            self.seed_update()
        return self.sharded.backward(closure_loss, default, accumulating=self._is_accumulating)

    @override
    def update(self, optimizer: Optimizer, closure: Closure, apply: Closure) -> Any:
        with self.updating(), split_groups_by_mesh(optimizer):
            result = self.sharded.update(optimizer, closure, apply)
        self.sharded.end_check()  # a backward in two halves has not ended the check
        return result

    @override
    def complete_backward(self) -> None:
        if not self._is_accumulating:
            self._complete_gradients()

    @property
    def _averages_gradients(self) -> bool:
        """Whether neither FSDP nor DDP averages the gradients of replicas."""
        if self.replicates(self.mesh):
            return self.mesh.pp > 1
        return self._local is not None

    def _complete_gradients(self) -> None:
        self.sharded.add_gradients()
        self.end_backward()
        if self.sharded.is_sharded:
            left_whole = [p for p in self.module.parameters() if is_left_whole(p)]
            average_gradients(left_whole, self.device_group(*self.gradient_axes))
        if self._averages_gradients and not self.is_local:
            options = self._shard_config.options(param_dtype_of(self.precision_plugin))
            average_gradients(
                self.module.parameters(), self.device_group("dp_replicate"), options.reduce_dtype
            )
        without = self.sharded.without_gradient()
        is_usual = self._shard_config.find_unused_parameters or self.is_manual
        if is_usual or self.mesh.data_size == 1:  # ranks that share data use the same
            for name in without:  # of zeros, which are None on a single device
                self.module.get_parameter(name).grad = None
        else:
            check_gradients(without)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        if self.is_manual:  # a step may look at gradients, or drop them, at any time
            yield
            return
        stays = self.sharded.no_sync() if self._replica is None else self.keeping_gradients()
        self._is_accumulating = True
        try:
            with nullcontext() if self._reduces_each else stays:
                yield
        finally:
            self._is_accumulating = False
