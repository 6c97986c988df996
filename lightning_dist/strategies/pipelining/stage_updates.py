"""Lightning's calls for each batch of a pipeline: its step, its backward and its update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.engine.data_parallel.replicas import average_used, broadcast_state
from lightning_dist.engine.parallelize.clip_grad import AsyncGradNorm, clip_grad_norm_
from lightning_dist.engine.precision.overflow import AsyncOverflow, Overflow, PerStageOverflow
from lightning_dist.engine.schedules.update_rule import UpdateRule
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.strategies.base import lightning_internals
from lightning_dist.strategies.base.clipping import ClipGradNorm
from lightning_dist.strategies.base.run_setup import Closure, RunSetup
from lightning_dist.strategies.pipelining import checks
from lightning_dist.strategies.pipelining.results.outside_tensors import note_pairing
from lightning_dist.strategies.pipelining.session import Session


class StageUpdates(RunSetup):
    """Base of strategies that train and update a rank's stages."""

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
        return self._config.family.update_rule

    # --- one update --------------------------------------------------------------------------

    def complete_gradients(self) -> None:
        """Averages the gradients in the parameters over the replicas."""
        if self.mesh.data_size > 1:
            own = [*self.session.pipeline.stages.updated_parameters().values()]
            found = average_used([p.grad for p in own], own, self.data_device_group)
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
            found = average_used(before, [*own.values()], self.data_device_group)
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
        arguments, session = checks.flatten_arguments(args, kwargs), self.session
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
    def update(self, optimizer: Optimizer, closure: Closure, apply: Closure) -> Any:
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
        if self._session.pipeline.asynchronous and self._session.updates.is_in_step:
            raise ValueError(
                f"schedule={self._config.schedule!r} has other batches in flight in the hooks of a"
                " batch's update, so the stages have no state in common. Save checkpoints in"
                " `on_train_batch_start` or `on_train_batch_end`, or in hooks of a validation."
            )
        if self.is_running:
            self._session.updates.drain(self.optimizers[0])
            self._session.step_state.merge()
            broadcast_state(self.module.buffers(), self.data_device_group)

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
