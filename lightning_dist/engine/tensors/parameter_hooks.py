"""Run the hooks of a parameter on its whole gradient, where autograd has seen parts of it.

Autograd would run them for each micro-batch, or not at all where a stage computes with other
versions of its weights, and of a parameter that several stages use for each stage's summand.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_dist.engine.tensors.patch import gradient_hooks_of


@torch.no_grad()
def add_with_hooks(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Adds a gradient to ``parameter.grad`` as autograd does, between the parameter's hooks.

    Args:
        parameter: Whose gradient it is.
        gradient: That of a batch.
    """
    before, behind = gradient_hooks_of(parameter)
    for hook in before:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed.clone()
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    for hook in behind:
        hook(parameter)


def with_hooks(parameter: nn.Parameter, gradient: Tensor) -> Tensor | None:
    """Returns what a parameter's hooks make of a gradient; ``parameter.grad`` stays.

    Args:
        parameter: Whose gradient it is.
        gradient: That of an update; may be changed.
    """
    installed, parameter.grad = parameter.grad, None
    try:
        add_with_hooks(parameter, gradient)
        return parameter.grad
    finally:
        parameter.grad = installed
