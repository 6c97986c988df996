"""The updates of a pipeline's stages: one owner, from the held gradients to the optimizer's step.

Before an update, gradients are averaged over the data replicas, summed over the stages that share a
parameter, and clipped by the norm of the whole model's gradient. If gradients are final before
their update is due, all of that is sent meanwhile. The schedule's update rule says which.
:class:`.Updates` has the order of one update; this class connects it with Lightning's calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.engine.data_parallel.replicas import (
    average,
    average_gradients,
    broadcast_state,
)
from lightning_dist.engine.parallelize.clip_grad import AsyncGradNorm, clip_grad_norm_
from lightning_dist.engine.precision.overflow import AsyncOverflow, Overflow, PerStageOverflow
from lightning_dist.engine.schedules.update_rule import UpdateRule
from lightning_dist.strategies.base import lightning_internals, model_checks
from lightning_dist.strategies.base.clipping import ClipGradNorm
from lightning_dist.strategies.pipelining import checks
from lightning_dist.strategies.pipelining.movable_layers import MovableLayers


class StageUpdates(MovableLayers):
    """A strategy that updates a rank's stages; see the module's docstring."""

    _accumulating = False
    _norms: AsyncGradNorm | None = None
    _votes: AsyncOverflow | None = None

    @property
    def _rule(self) -> UpdateRule:
        return self._config.schedules.update_rule

    # --- one update --------------------------------------------------------------------------

    def complete_gradients(self) -> None:
        """Averages the gradients in the parameters over the replicas."""
        if self.mesh.data_size > 1:
            parameters = self.session.pipeline.stages.named_parameters()
            average_gradients(parameters.values(), self.data_group)

    def complete_early(self, update: int, gradients: Mapping[str, Tensor]) -> None:
        """Averages gradients that are final, and starts their sums, norms and votes.

        Args:
            update: Number of the update that the gradients are for.
            gradients: The gradients by parameter name; changed.
        """
        if self.mesh.data_size > 1:
            average(list(gradients.values()), self.data_group)
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
            self._norms = AsyncGradNorm(self.group("pp", purpose="norms"))
        return self._clip_grad_norm

    def _clip_grad_norm(self, parameters: list[Tensor], max_norm: float) -> Tensor:
        if self._norms is not None:
            norm = self._norms.of(self.session.pipeline.due_update)
            return clip_grad_norm_(parameters, max_norm, total_norm=norm)
        exclude = self.session.counted_elsewhere
        return clip_grad_norm_(parameters, max_norm, pp_group=self.group("pp"), exclude=exclude)

    @override
    def overflow(self) -> Overflow:
        self._votes = None
        if not self._rule.is_asynchronous:
            return super().overflow()
        group = self.group(*self.mesh.sizes, purpose="overflow")
        if not self._rule.is_joint:
            return PerStageOverflow(group, lambda: self.session.pipeline)
        self._votes = AsyncOverflow(group, lambda: self.session.pipeline.due_update)
        return self._votes

    # --- Lightning's calls -------------------------------------------------------------------

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
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        def apply() -> Any:
            return super(StageUpdates, self).optimizer_step(optimizer, closure, model, **kwargs)

        return self.session.updates.step(optimizer, closure, apply)

    @override
    def drain(self) -> None:
        """Finishes the batches in flight, so that all stages have updated for the same batches.

        The first replica's buffers (running statistics) are broadcast. Collective: every rank must
        call it. Validation, checkpoints and the end of training call it by themselves.
        """
        if self._session is None or not self.optimizers:
            return
        self.check_peers()
        if self.is_running:
            self._session.updates.drain(self.optimizers[0])
            broadcast_state(self.module.buffers(), self.data_group)

    @override
    def before_validation(self) -> None:
        with lightning_internals.as_of_training_step(self.module):  # hooks of updates may log
            self.drain()
        self.check_group_values()
        self.session.runner.catch_up()

    @override
    def end_training(self) -> None:
        self.drain()
        self.check_group_values()

    @override
    def end_epoch(self) -> None:
        self.session.runner.catch_up()

    def forget_batches_in_flight(self) -> None:
        """Drains the batches before a load, and drops their outcomes."""
        session = self._session
        if session is None or not session.pipeline.batches_since_drain:
            return
        if self._config.asynchronous:
            with lightning_internals.as_of_training_step(self.module):
                self.drain()
            session.runner.forget()

    def check_group_values(self) -> None:
        """Checks that stages agree on numbers in parameter groups. Collective.

        Raises:
            ValueError: The numbers differ.
        """
        if self.mesh.pp > 1:
            model_checks.check_group_values(self.optimizers, self.group(*self.mesh.sizes))
