"""A pipeline's updates: from the batch that Lightning steps for to the optimizer's writes.

Before an update, gradients are averaged over the data replicas, summed over the stages that share a
parameter, and clipped by the norm of the whole model's gradient. If gradients are final before
their update is due, all of that is sent meanwhile. The schedule's update rule says which.

:class:`Updates` has the order of one update, and drains.
:class:`StageUpdates` has Lightning's calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.engine.common.mesh_shape import DATA_AXES
from lightning_dist.engine.data_parallel.replicas import average_used, broadcast_state
from lightning_dist.engine.parallelize.clip_grad import AsyncGradNorm, clip_grad_norm_
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.pipeline.tied_gradients import TiedSums
from lightning_dist.engine.precision.overflow import AsyncOverflow, Overflow, PerStageOverflow
from lightning_dist.engine.schedules.update_rule import UpdateRule
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.stashing.learning_rates import HyperparameterHistory, RateCorrection
from lightning_dist.engine.tensors.dtensor import local_part
from lightning_dist.strategies.base import lightning_internals
from lightning_dist.strategies.base.callback_order import is_overridden_by_user
from lightning_dist.strategies.base.clipping import ClipGradNorm
from lightning_dist.strategies.base.run_setup import RunSetup
from lightning_dist.strategies.pipelining import checks
from lightning_dist.strategies.pipelining.step_state import note_pairing

if TYPE_CHECKING:
    from lightning_dist.strategies.pipelining.session import Session

_AROUND_ZERO_GRAD = ("on_before_zero_grad", "optimizer_zero_grad")


class Updates:
    """The optimizer's side of a pipeline.

    Args:
        precision_plugin: Runs the hooks, the clipping and the step.
        begin_sums: Called before gradients are added to those that an earlier update has left.
        complete_gradients: Called before each update with the rank's gradients in place, unless
            they were complete before.
        on_update: Called at each update, when its staleness is known.
        norms: Returns the context manager in which users' hooks take norms of gradients.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        pipeline: Pipeline,
        precision_plugin: Precision,
        tied: TiedSums,
        *,
        begin_sums: Callable[[], None],
        complete_gradients: Callable[[], None],
        on_update: Callable[[], None],
        norms: Callable[[], AbstractContextManager[None]],
        rate_correction: RateCorrection | None = None,
    ) -> None:
        self._module = module
        self._pipeline = pipeline
        self._precision_plugin = precision_plugin
        self._begin_sums = begin_sums
        self._complete_gradients = complete_gradients
        self._tied = tied
        self._on_update = on_update
        self._norms = norms
        self._is_in_step = self._has_run = False
        self._zeroing_is_seen = is_overridden_by_user(_AROUND_ZERO_GRAD, module)
        self._spent_by: Optimizer | None = None
        self._history = HyperparameterHistory(
            None
            if rate_correction is None
            else lambda: rate_correction.factor(module.trainer.global_step)
        )

    def begin_batch(self) -> None:
        """Makes room for the gradients of a batch.

        Raises:
            ValueError: An optimizer runs an asynchronous batch twice.
        """
        if self._pipeline.asynchronous and self._has_run:
            raise ValueError(
                "The optimizer has called its closure twice in a step, as SAM does. An asynchronous"
                " schedule runs each batch once, and applies an earlier one's gradients. Use a"
                " synchronous schedule like '1f1b', or an optimizer that takes one gradient."
            )
        self._has_run = self._is_in_step
        # Lightning zeroes gradients behind the step, in which a pipeline runs the backward too. A
        # rank would hold the old gradients and the new ones at once, a fifth of Adam's stage.
        if self._spent_by is not None:
            self._spent_by.zero_grad()
        self._spent_by = None

    def backward(self, loss: Tensor, *, accumulating: bool) -> Tensor:
        """Installs the held gradients, between Lightning's hooks around the backward.

        Returns:
            The loss.

        Raises:
            ValueError: An asynchronous batch was run outside of the optimizer's step.
        """
        if self._pipeline.asynchronous and not self._is_in_step:
            raise ValueError(
                "`optimizer_step` ran its closure outside of `optimizer.step`. An asynchronous"
                " schedule applies there what earlier batches have left, so it must not be left"
                " out. Call `optimizer.step(closure=optimizer_closure)` for each batch, or use a"
                " synchronous schedule like '1f1b'."
            )
        return self._backward(loss, accumulating=accumulating)

    def _backward(self, loss: Tensor, *, accumulating: bool) -> Tensor:
        if not self._pipeline.has_gradients:
            return loss
        self._precision_plugin.pre_backward(loss, self._module)
        shared = self._pipeline.stages.updated_parameters() if self._tied.names else {}
        self._tied.set_apart(shared)
        self._begin_sums()
        is_reduced = accumulating or self._pipeline.update_rule.completes_early
        self._pipeline.install_gradients(
            None if is_reduced else self._complete, is_complete=not accumulating
        )
        if accumulating:
            self._tied.keep(shared)
        elif self._tied.names:
            self._tied.install(self._pipeline.due_update, shared)
        loss = self._precision_plugin.post_backward(loss, self._module)
        if not accumulating:
            self._pipeline.begin_update()
            self._on_update()
        return loss

    def step(
        self, optimizer: Optimizer, closure: Callable[[], Any], apply: Callable[[], Any]
    ) -> Any:
        """Runs a batch, and applies the update that it brings.

        Returns:
            The return value of ``closure`` or of ``apply``, whichever was called.
        """
        self._is_in_step, self._has_run = True, False
        try:
            with self._norms():
                self._history.remember(optimizer)
                # While the pipeline fills too: forwards foresee updates at the next one's rate.
                with self._history.of_next_update(optimizer):
                    if self._pipeline.batches_since_drain < self._pipeline.delay:
                        return closure()
                    result = apply()
                self._end_update(optimizer)
                return result
        finally:
            self._is_in_step = False

    def drain(self, optimizer: Optimizer) -> None:
        """Runs the backwards of the batches in flight and applies each."""
        with torch.enable_grad():
            for _ in self._pipeline.drain():
                with self._history.of_next_update(optimizer):
                    self._precision_plugin.optimizer_step(
                        optimizer, model=self._module, closure=lambda: self._install(optimizer)
                    )
                self._end_update(optimizer)

    def _end_update(self, optimizer: Optimizer) -> None:
        self._pipeline.end_update()
        self._history.end_update()
        is_torchs = type(optimizer).zero_grad is Optimizer.zero_grad
        self._spent_by = optimizer if is_torchs and not self._zeroing_is_seen else None

    def _complete(self) -> None:
        self._complete_gradients()
        if self._tied.names:
            trained = self._pipeline.stages.named_parameters()
            given = {n: p.grad for n, p in trained.items() if p.grad is not None}
            gradients = {name: local_part(gradient) for name, gradient in given.items()}
            self._tied.post(self._pipeline.due_update, gradients, trained)

    def _install(self, optimizer: Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss = torch.zeros((), device=self._module.device)
        return self._backward(loss, accumulating=False)


class StageUpdates(RunSetup):
    """A strategy that trains and updates a rank's stages: Lightning's calls for each batch."""

    def __init__(self, config: PipelineConfig, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._config = config
        self._session: Session | None = None
        self._in_step = False
        self._accumulating = False
        self.holds_gradients = False
        self._norms: AsyncGradNorm | None = None
        self._votes: AsyncOverflow | None = None

    @property
    def config(self) -> PipelineConfig:
        """The arguments of the pipeline, with the present partition if layers have moved."""
        return self._config

    @property
    def session(self) -> Session:
        """The parts of the pipeline, from ``setup`` to ``teardown``."""
        assert self._session is not None, "the pipeline exists from setup to teardown"
        return self._session

    @property
    def _rule(self) -> UpdateRule:
        return self._config.schedules.update_rule

    # --- one update --------------------------------------------------------------------------

    def complete_gradients(self) -> None:
        """Averages the gradients in the parameters over the replicas."""
        if self.mesh.data_size > 1:
            own = [*self.session.pipeline.stages.updated_parameters().values()]
            found = average_used([p.grad for p in own], own, self.device_group(*DATA_AXES))
            for parameter, gradient in zip(own, found, strict=True):
                parameter.grad = gradient

    def complete_early(self, update: int, gradients: dict[str, Tensor]) -> None:
        """Averages gradients that are final, and starts their sums, norms and votes.

        Args:
            update: Number of the update that the gradients are for.
            gradients: The gradients by parameter name; changed.
        """
        if self.mesh.data_size > 1:
            own = self.session.pipeline.stages.updated_parameters()
            before = [gradients.get(name) for name in own]
            found = average_used(before, [*own.values()], self.device_group(*DATA_AXES))
            means = zip(own, found, strict=True)
            gradients.update({name: mean for name, mean in means if mean is not None})
        counted = self.session.tied.post(update, gradients)
        if self._norms is not None:
            self._norms.post(update, counted.values())
        if self._votes is not None:
            self._votes.post(update, gradients.values())

    @override
    def gradient_clipping(self, trainer: pl.Trainer) -> ClipGradNorm | None:
        if not self._rule.is_joint:
            return None  # by each stage's own norm: the stages' updates are of different batches
        self._norms = None
        if self._rule.completes_early and checks.clips_by_norm(trainer, self.module):
            self._norms = AsyncGradNorm(self.device_group("pp", purpose="norms"))
        return self._clip_grad_norm

    def _clip_grad_norm(self, parameters: list[Tensor], max_norm: float) -> Tensor:
        if self._norms is not None:
            norm = self._norms.of(self.session.pipeline.due_update)
            return clip_grad_norm_(parameters, max_norm, total_norm=norm)
        stages, exclude = self.device_group("pp"), self.session.counted_elsewhere
        return clip_grad_norm_(parameters, max_norm, pp_group=stages, exclude=exclude)

    @override
    def overflow(self) -> Overflow:
        self._votes = None
        if not self._rule.is_asynchronous:
            return super().overflow()
        group = self.device_group(*self.mesh.sizes, purpose="overflow")
        if not self._rule.is_joint:
            return PerStageOverflow(
                group, lambda: self.session.pipeline.gradients_of_batch, self._is_everywhere
            )
        self._votes = AsyncOverflow(group, lambda: self.session.pipeline.due_update)
        return self._votes

    def _is_everywhere(self, batch: int) -> bool:
        pipeline = self.session.pipeline
        first_since_drain = pipeline.num_batches - pipeline.batches_since_drain
        return batch < first_since_drain or batch + pipeline.lag + 1 < pipeline.num_batches

    # --- Lightning's calls -------------------------------------------------------------------

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Marks that a step runs, in which no layer can move."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        arguments, session = checks.arguments_of_step(args, kwargs), self.session
        session.updates.begin_batch()
        with self.stepping():
            result = session.runner.train(arguments, self.precision_plugin.train_step_context)
        if session.staleness_log is not None:
            session.staleness_log.log()
        return result

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        self.holds_gradients = self._accumulating
        return self.session.updates.backward(closure_loss, accumulating=self._accumulating)

    @override
    def update(
        self, optimizer: Optimizer, closure: Callable[[], Any], apply: Callable[[], Any]
    ) -> Any:
        return self.session.updates.step(optimizer, closure, apply)

    @override
    def drain(self) -> None:
        """Finishes the batches in flight, so that all stages have updated for the same batches.

        The first replica's buffers are broadcast. Collective: every rank must call it. Validation,
        checkpoints and the end of training call it by themselves.
        """
        if self._session is None or not self.optimizers:
            return
        self.check_peers()
        if self.is_running:
            self._session.updates.drain(self.optimizers[0])
            self._session.step_state.merge()
            broadcast_state(self.module.buffers(), self.device_group(*DATA_AXES))

    @override
    def annotate(self, exception: BaseException) -> None:
        super().annotate(exception)
        if self.mesh.pp > 1:
            note_pairing(exception)

    @override
    def before_validation(self) -> None:
        with lightning_internals.as_of_training_step(self.module):  # hooks of updates may log
            super().before_validation()
        self.session.runner.catch_up()

    @override
    def end_epoch(self) -> None:
        self.session.runner.catch_up()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        session, is_asynchronous = self._session, self._config.asynchronous
        if session is not None and is_asynchronous and session.pipeline.batches_since_drain:
            with lightning_internals.as_of_training_step(self.module):
                self.drain()
            session.runner.forget()  # outcomes of the batches that were in flight
        super().load_model_state_dict(checkpoint, strict)
