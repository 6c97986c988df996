"""Time an update, of the optimizer that a plan assumes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_dist.engine.common.device_group import finish
from lightning_dist.engine.planning.search.model_costs import MeasuredBatch

_FIRST_RUNS = 2  # which make states, and touch memory


class TimedUpdate:
    """Times an optimizer on copies of a module's parameters, between the steps of the module.

    By itself it would be slower than in a run, by half: an allocator without other tensors gives
    an optimizer's temporary ones back to the host, and gets new pages for each.

    Args:
        module: The module, whose gradients the copies take.
        device: Its device.
        states_per_parameter: As for :func:`optimizer_of`.
    """

    def __init__(self, module: nn.Module, device: torch.device, states_per_parameter: int) -> None:
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._device, self._states = device, states_per_parameter
        self._optimizer: Optimizer | None = None
        self._taken: list[float] = []

    def added_to(self, batch: MeasuredBatch) -> MeasuredBatch:
        """Returns costs with the seconds of an update in the median; 0.0 if there was none."""
        seconds = median(self._taken[_FIRST_RUNS:] or [0.0])
        return replace(batch, step=replace(batch.step, update_seconds=seconds))

    def run(self) -> None:
        """Updates the copies by the parameters' present gradients."""
        if not self._parameters:
            return
        if self._optimizer is None:
            copies = [p.detach().clone() for p in self._parameters]
            self._optimizer = optimizer_of(copies, self._states)
        copies = self._optimizer.param_groups[0]["params"]
        for copy, parameter in zip(copies, self._parameters, strict=True):
            copy.grad = None if parameter.grad is None else dense(parameter.grad)
        self._taken.append(seconds_of(self._optimizer.step, self._device))


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Returns the time of a call, to the end of what it does on the device."""
    finish(device)  # what is under way is not the call's
    start = time.perf_counter()
    run()
    finish(device)
    return time.perf_counter() - start


def dense(gradient: Tensor) -> Tensor:
    """Returns a gradient as the optimizers of :func:`optimizer_of` take it."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def optimizer_of(parameters: Sequence[Tensor], states_per_parameter: int) -> Optimizer:
    """Returns an optimizer that keeps so many tensors of a parameter's size."""
    momentum = 0.9 if states_per_parameter else 0.0
    return AdamW(parameters) if states_per_parameter > 1 else SGD(parameters, 0.1, momentum)
