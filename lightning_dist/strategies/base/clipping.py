"""Gradient clipping by the norm of the whole model's gradient.

Lightning clips each rank's gradients by their own norm, which on two stages leaves a total norm of
up to sqrt(2) times the bound. The precision plugin is the one place of Lightning's clipping, and
passes all gradients at once to torch, which takes shards or whole tensors, not both together.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_dist.engine.parallelize.clip_grad import clip_grad_value_
from lightning_dist.engine.tensors.patch import replace_method

ClipGradNorm = Callable[[list[Tensor], float], Tensor]
"""Takes parameters and the largest norm of the whole model's gradient; returns the norm."""


def clip_whole_gradient(plugin: Precision, clip_grad_norm: ClipGradNorm) -> Callable[[], None]:
    """Makes a precision plugin clip by the norm of the whole model's gradient."""

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
        clip_grad_norm(list(plugin.main_params(optimizer)), float(clip_val))

    def clip_grad_by_value(optimizer: Optimizer, clip_val: int | float) -> None:
        clip_grad_value_(plugin.main_params(optimizer), float(clip_val))

    undo = ExitStack()
    undo.callback(replace_method(plugin, "clip_grad_by_norm", clip_grad_by_norm))
    undo.callback(replace_method(plugin, "clip_grad_by_value", clip_grad_by_value))
    return undo.close
