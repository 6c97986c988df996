"""Apply the gradients that the pipeline holds: when Lightning steps, and when it drains."""

from __future__ import annotations

from collections.abc import Callable
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


class Updates:
    """The optimizer's side of a pipeline.

    Args:
        module: The user's module.
        pipeline: This rank's stages.
        precision_plugin: Runs the hooks, the clipping and the step.
        tied: Sums the gradients of parameters that several stages use.
        complete_gradients: Called before each update with the rank's gradients in place, unless
            they were complete before.
        on_update: Called at each update, when its staleness is known.
        rate_correction: Correction of learning rates for stale weights.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        pipeline: Pipeline,
        precision_plugin: Precision,
        tied: TiedSums,
        *,
        complete_gradients: Callable[[], None],
        on_update: Callable[[], None],
        rate_correction: RateCorrection | None = None,
    ) -> None:
        self._module = module
        self._pipeline = pipeline
        self._precision_plugin = precision_plugin
        self._complete_gradients = complete_gradients
        self._tied = tied
        self._on_update = on_update
        self._is_in_step = False
        self._history = HyperparameterHistory(
            None
            if rate_correction is None
            else lambda: rate_correction.factor(module.trainer.global_step)
        )

    def backward(self, loss: Tensor, *, accumulating: bool) -> Tensor:
        """Installs the held gradients, between Lightning's hooks around the backward.

        Args:
            loss: The loss that Lightning passes.
            accumulating: Whether more gradients come before the next step.

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
        is_reduced = accumulating or self._pipeline.update_rule.completes_early
        self._pipeline.install_gradients(
            None if is_reduced else self._complete, is_complete=not accumulating
        )
        if not accumulating and self._tied.names:
            self._tied.install(self._pipeline.due_update, self._pipeline.stages.named_parameters())
        loss = self._precision_plugin.post_backward(loss, self._module)
        if not accumulating:
            self._pipeline.begin_update()
            self._on_update()
        return loss

    def step(
        self, optimizer: Optimizer, closure: Callable[[], Any], apply: Callable[[], Any]
    ) -> Any:
        """Runs a batch, and applies the update that it brings.

        Args:
            optimizer: The optimizer that steps.
            closure: Runs the batch.
            apply: Runs the batch and the optimizer's step.

        Returns:
            The return value of ``closure`` or of ``apply``, whichever was called.
        """
        self._is_in_step = True
        try:
            return self._step(optimizer, closure, apply)
        finally:
            self._is_in_step = False

    def _step(
        self, optimizer: Optimizer, closure: Callable[[], Any], apply: Callable[[], Any]
    ) -> Any:
        self._history.remember(optimizer)
        # While the pipeline fills too: forwards that foresee updates do so at the next one's rate.
        with self._history.of_next_update(optimizer):
            if self._pipeline.batches_since_drain < self._pipeline.delay:
                return closure()
            result = apply()
        self._end_update()
        return result

    def drain(self, optimizer: Optimizer) -> None:
        """Runs the backwards of the batches in flight and applies each.

        Args:
            optimizer: The optimizer that steps.
        """
        with torch.enable_grad():
            for _ in self._pipeline.drain():
                with self._history.of_next_update(optimizer):
                    self._precision_plugin.optimizer_step(
                        optimizer, model=self._module, closure=lambda: self._install(optimizer)
                    )
                self._end_update()

    def _end_update(self) -> None:
        self._pipeline.end_update()
        self._history.end_update()

    def _complete(self) -> None:
        self._complete_gradients()
        if self._tied.names:
            parameters = self._pipeline.stages.named_parameters().items()
            gradients = {n: local_part(p.grad) for n, p in parameters if p.grad is not None}
            self._tied.post(self._pipeline.due_update, gradients)

    def _install(self, optimizer: Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss = torch.zeros((), device=self._module.device)
        return self._backward(loss, accumulating=False)
