"""The update that a rank owes, from when its gradients are complete until they are applied.

The backwards leave gradients with their stages. :class:`PendingUpdate` moves the gradients of all
stages of the rank to ``p.grad``, once per update and weighed as the losses ask.

Parameters' hooks run then, once for each batch, on its whole gradient. If other ranks hold the same
parameter, its hooks run on the rank that sums its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_dist.engine.pipeline.loss import LossWeights
from lightning_dist.engine.pipeline.stage import Stage
from lightning_dist.engine.profiling.meters.recorder import Recorder
from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.timeline import SpanKind
from lightning_dist.engine.tensors.parameter_hooks import add_with_hooks, with_hooks
from lightning_dist.engine.tensors.patch import has_gradient_hooks


class PendingUpdate:
    """Holds at most one update of a rank's stages.

    Args:
        stages: The rank's stages.
        recorder: Records the spans.
        loss_weights: Weights to divide the gradients by.
        completes_early: Whether gradients are final before their update is due, so that
            :meth:`complete_early` finishes the gradients.
        shared: Names of the parameters that other ranks have too, whose hooks run elsewhere.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        recorder: Recorder,
        loss_weights: LossWeights,
        *,
        completes_early: bool,
        shared: Collection[str] = (),
    ) -> None:
        self._stages = stages
        self._shared = shared
        self._recorder = recorder
        self._loss_weights = loss_weights
        self._completes_early = completes_early
        self._loss_scales: dict[int, float] = {}
        self._action: Action | None = None
        self._start: Any = None

    @property
    def is_due(self) -> bool:
        """Whether there is an update."""
        return self._action is not None

    @property
    def index(self) -> int:
        """Index of the update, counted since the last drain."""
        return self._due.microbatch_index

    @property
    def _due(self) -> Action:
        assert self._action is not None, "no gradients are held"
        return self._action

    def note_loss_scale(self, update: int, scale: float) -> None:
        """Remembers the loss scale to divide an update's gradients by.

        Args:
            update: Index of the update, counted since the last drain.
            scale: Factor of the update's losses.
        """
        self._loss_scales[update] = scale

    def hold(self, action: Action | None) -> None:
        """Sets the update.

        Args:
            action: The update's ``STEP``; None if the round ended without one.
        """
        self._action = action

    def complete_early(self, update: int) -> dict[str, Tensor]:
        """Finishes gradients whose update is not due yet, and returns them by parameter name.

        Args:
            update: Index of the update that the gradients are for.
        """
        stages = self._stages.values()
        held = {n: g for stage in stages for n, g in stage.gradients.held(update).items()}
        self._unscale(update, held.values())
        self._loss_weights.collect(update)
        self._loss_weights.divide(held.values())
        for stage in stages:
            self._run_hooks_early(stage, update)
        return {n: g for stage in stages for n, g in stage.gradients.held(update).items()}

    def install(self, reduce: Callable[[], None] | None, *, is_complete: bool) -> None:
        """Moves the held gradients to ``p.grad``, adding to what is there.

        Args:
            reduce: Averages ``p.grad`` over the data replicas.
            is_complete: Whether no other batch adds to the gradients before the update.
        """
        update = self.index if self.is_due else 0
        hooked: dict[nn.Parameter, Tensor] = {}
        shared = self._find_shared()
        for stage in self._stages.values():
            taken = stage.gradients.take(update)
            if not self._completes_early:
                self._unscale(update, taken.values())
            for name, parameter in stage.named_parameters().items():
                if (gradient := taken.get(name)) is None:
                    continue
                runs_hooks = not (stage.gradients.runs_hooks or self._completes_early)
                if runs_hooks and has_gradient_hooks(parameter) and parameter not in shared:
                    # Stages of one rank may share the parameter.
                    found = hooked.get(parameter)
                    hooked[parameter] = gradient if found is None else found.add_(gradient)
                elif parameter.grad is not None:
                    parameter.grad.add_(gradient)
                else:
                    parameter.grad = gradient
        for parameter, gradient in hooked.items():
            add_with_hooks(parameter, gradient)
        self._loss_weights.collect(update)
        if is_complete and not self._completes_early:
            # A dict, for stages of one rank may share a parameter.
            own = {id(p): p.grad for s in self._stages.values() for p in s.layers.parameters()}
            self._loss_weights.divide(grad for grad in own.values() if grad is not None)
        if reduce is not None and self.is_due:
            action = replace(self._due, kind=ActionKind.REDUCE_GRAD)
            with self._recorder.span(SpanKind.COMMUNICATION, action):
                reduce()

    def _find_shared(self) -> set[nn.Parameter]:
        """Returns the parameters that other ranks have too; two stages may name the same one."""
        if not self._shared:
            return set()
        named = (item for s in self._stages.values() for item in s.named_parameters().items())
        return {parameter for name, parameter in named if name in self._shared}

    def _run_hooks_early(self, stage: Stage, update: int) -> None:
        """Replaces held gradients with the parameters' hooks' results."""
        if stage.gradients.runs_hooks:
            return
        held = stage.gradients.held(update)
        for name, parameter in stage.named_parameters().items():
            if name in held and has_gradient_hooks(parameter) and name not in self._shared:
                gradient = with_hooks(parameter, held.pop(name))
                if gradient is not None:
                    held[name] = gradient

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
        """Ends the update after the optimizer's writes."""
        self._recorder.record(SpanKind.UPDATE, self._due, self._start)
        self._loss_scales.pop(self.index, None)
        self._action = None

    def clear(self) -> None:
        """Forgets the update, after a failure."""
        self._loss_weights.clear()
        self._loss_scales.clear()
        self._action = None
