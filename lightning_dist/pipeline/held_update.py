"""The update that a rank owes, from when its gradients are complete until they are applied.

The backwards leave gradients with their stages. Here they become ``p.grad``, once per update and
weighed as the losses ask, whichever stages the rank has.

Parameters' hooks run then, once for each batch, on its whole gradient. Autograd would run them for
each micro-batch, or not at all where a stage computes with other versions of its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.module_hooks import gradient_hooks_of, has_gradient_hooks
from lightning_dist.pipeline.actions import Action, ActionKind
from lightning_dist.pipeline.loss_weights import LossWeights
from lightning_dist.pipeline.recorder import Recorder
from lightning_dist.pipeline.stage import Stage
from lightning_dist.pipeline.timeline import SpanKind


class HeldUpdate:
    """Holds at most one update of a rank's stages.

    Args:
        stages: The rank's.
        recorder: Where the spans go.
        loss_weights: What the gradients are divided by.
        comes_late: Whether gradients are complete long before their update, so that
            :meth:`complete_early` sees to them.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        recorder: Recorder,
        loss_weights: LossWeights,
        *,
        comes_late: bool,
    ) -> None:
        self._stages = stages
        self._recorder = recorder
        self._loss_weights = loss_weights
        self._comes_late = comes_late
        self._loss_scales: dict[int, float] = {}
        self._action: Action | None = None
        self._start: Any = None

    @property
    def is_due(self) -> bool:
        """Whether there is one."""
        return self._action is not None

    @property
    def index(self) -> int:
        """Which it is, counted since the last drain."""
        return self._due.microbatch_index

    @property
    def _due(self) -> Action:
        assert self._action is not None, "no gradients are held"
        return self._action

    def note_loss_scale(self, update: int, scale: float) -> None:
        """Remembers what the gradients of an update are to be divided by.

        Args:
            update: Which, counted since the last drain.
            scale: What its losses are multiplied by.
        """
        self._loss_scales[update] = scale

    def hold(self, action: Action | None) -> None:
        """Takes an update on.

        Args:
            action: Its step; None where the round ended without one.
        """
        self._action = action

    def complete_early(self, update: int) -> dict[str, Tensor]:
        """Finishes gradients whose update is not due yet, and gives them by parameter name.

        Args:
            update: What they are for.
        """
        stages = self._stages.values()
        held = {n: g for stage in stages for n, g in stage.gradients.held(update).items()}
        self._unscale(update, held.values())
        self._loss_weights.collect(update)
        self._loss_weights.divide(held.values())
        hooked = [_run_hooks_early(stage, update) for stage in stages]
        return {name: gradient for found in hooked for name, gradient in found.items()}

    def install(self, reduce: Callable[[], None] | None, *, is_complete: bool) -> None:
        """Moves the held gradients to ``p.grad``, adding to what is there.

        Args:
            reduce: Averages ``p.grad`` over the data replicas.
            is_complete: Whether no other batch adds to them before the update.
        """
        update = self.index if self.is_due else 0
        for stage in self._stages.values():
            taken = stage.gradients.take(update)
            if not self._comes_late:
                self._unscale(update, taken.values())
            runs_hooks = not (stage.gradients.runs_hooks or self._comes_late)
            for name, parameter in stage.named_parameters().items():
                if (gradient := taken.get(name)) is None:
                    continue
                if runs_hooks and has_gradient_hooks(parameter):
                    _add_with_hooks(parameter, gradient)
                elif parameter.grad is not None:
                    parameter.grad.add_(gradient)
                else:
                    parameter.grad = gradient
        self._loss_weights.collect(update)
        if is_complete and not self._comes_late:
            # A dict, for stages of one rank may share a parameter.
            own = {id(p): p.grad for s in self._stages.values() for p in s.layers.parameters()}
            self._loss_weights.divide(grad for grad in own.values() if grad is not None)
        if reduce is not None and self.is_due:
            action = replace(self._due, kind=ActionKind.REDUCE_GRAD)
            with self._recorder.span(SpanKind.COMMUNICATION, action):
                reduce()

    def _unscale(self, update: int, gradients: Iterable[Tensor]) -> None:
        scale = self._loss_scales.get(update, 1.0)
        if scale != 1.0:
            for gradient in gradients:
                gradient.div_(scale)

    def begin(self) -> None:
        """Stashes the weights; the optimizer's writes must come next."""
        self._start = self._recorder.mark()
        for stage in self._stages.values():
            stage.begin_update(self.index)

    def end(self) -> None:
        """Notes that the optimizer has written."""
        self._recorder.record(SpanKind.UPDATE, self._due, self._start)
        self._loss_scales.pop(self.index, None)
        self._action = None

    def clear(self) -> None:
        """Forgets the update, after a failure."""
        self._loss_weights.clear()
        self._loss_scales.clear()
        self._action = None


@torch.no_grad()
def _add_with_hooks(parameter: nn.Parameter, gradient: Tensor) -> Tensor | None:
    """Adds a gradient to ``parameter.grad`` as autograd does, and gives what hooks leave there."""
    before, behind = gradient_hooks_of(parameter)
    for hook in before:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed.clone()
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    for hook in behind:
        hook(parameter)
    return parameter.grad


def _run_hooks_early(stage: Stage, update: int) -> dict[str, Tensor]:
    """Runs hooks on held gradients, and gives what they have made of them."""
    held = stage.gradients.held(update)
    for name, parameter in () if stage.gradients.runs_hooks else stage.named_parameters().items():
        if name in held and has_gradient_hooks(parameter):
            installed, parameter.grad = parameter.grad, None
            gradient = _add_with_hooks(parameter, held.pop(name))
            if gradient is not None:
                held[name] = gradient
            parameter.grad = installed
    return held
