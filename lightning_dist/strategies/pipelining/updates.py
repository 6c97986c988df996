"""One update of a pipeline, from the batch that Lightning steps for to the optimizer's writes.

Before an update, gradients are averaged over the data replicas, summed over the stages that share a
parameter, and clipped by the norm of the whole model's gradient. If gradients are final before
their update is due, all of that is sent meanwhile. The schedule's update rule says which.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.pipeline.tied_gradients import TiedSums
from lightning_dist.engine.stashing.learning_rates import HyperparameterHistory, RateCorrection
from lightning_dist.engine.tensors.dtensor import local_part
from lightning_dist.strategies.base.callback_order import is_overridden_by_user
from lightning_dist.strategies.base.run_setup import Closure

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
        rate_correction: RateCorrection | None,
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

    @property
    def is_in_step(self) -> bool:
        """Whether a batch runs whose update the optimizer is about to apply."""
        return self._is_in_step

    def begin_batch(self) -> None:
        """Makes room for the gradients of a batch.

        Raises:
            ValueError: An optimizer runs an asynchronous batch twice.
        """
        if self._pipeline.asynchronous and self._has_run:
            raise ValueError(
                "The optimizer has called its closure twice in a step. An asynchronous schedule"
                " runs each batch once, and applies an earlier one's gradients. Use an optimizer"
                " that takes one gradient."
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

    def step(self, optimizer: Optimizer, closure: Closure, apply: Closure) -> Any:
        """Runs a batch, and applies the update that it brings.

        Returns:
            The return value of ``closure`` or of ``apply``, whichever was called.

        Raises:
            ValueError: An asynchronous batch was not run in the optimizer's step.
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
                if self._pipeline.has_gradients:
                    self._end_update(optimizer)
                elif self._pipeline.asynchronous:
                    raise ValueError(
                        "The optimizer has stepped without its closure, which runs the batch. An"
                        " asynchronous schedule keeps the weights of each update of a batch, so"
                        " there is none beside. Call `optimizer.step(closure=optimizer_closure)`"
                        " once for each batch, or use a synchronous schedule like '1f1b'."
                    )
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
