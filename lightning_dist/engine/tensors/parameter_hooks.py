"""Runs a parameter's hooks on its whole gradient, where autograd has computed partial gradients.

Autograd would run the hooks for each micro-batch. If a stage computes with other versions of its
weights, autograd would run none. For a parameter that several stages use, it would run them on each
stage's partial gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_dist.engine.tensors.patch import gradient_hooks_of


@torch.no_grad()
def add_with_hooks(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Adds a gradient to ``parameter.grad`` as autograd does, and runs the parameter's hooks.

    Args:
        parameter: The parameter to accumulate on.
        gradient: The parameter's gradient for a batch.
    """
    before, behind = gradient_hooks_of(parameter)
    for hook in before:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed.clone()
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    for hook in behind:
        hook(parameter)


def with_hooks(parameter: nn.Parameter, gradient: Tensor) -> Tensor | None:
    """Returns a gradient after the parameter's hooks; ``parameter.grad`` stays.

    Args:
        parameter: The parameter whose hooks run.
        gradient: The parameter's gradient for an update; may be changed in place.
    """
    installed, parameter.grad = parameter.grad, None
    try:
        add_with_hooks(parameter, gradient)
        return parameter.grad
    finally:
        parameter.grad = installed
