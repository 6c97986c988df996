"""Gradient clipping by the norm of the whole model's gradient.

Lightning clips each rank's gradients by their own norm, which on two stages leaves a total norm of
up to sqrt(2) times the bound. The precision plugin is the one place of Lightning's clipping, and
passes all gradients at once to torch, which takes shards or whole tensors, not both together.

Users clip by themselves, too: ``torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)`` in
``configure_gradient_clipping``, where a stage's module has that stage's parameters only, and one
with tensor-parallel layers has shards beside whole tensors. So where there are such layers, or
stages update together, torch's norm of the gradients is that of the whole gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from lightning_dist.engine.parallelize.clip_grad import (
    clip_grad_value_,
    group_alike,
    with_gradient,
)
from lightning_dist.engine.tensors.dtensor import whole
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


@contextmanager
def norms_of_whole_gradient(
    stages: dist.ProcessGroup | None = None,
    counted_elsewhere: Callable[[], Iterable[Tensor]] = list,
) -> Iterator[None]:
    """Lets torch's ``clip_grad_norm_`` clip by the norm of the whole model's gradient.

    All ranks must call it. It takes shards and whole tensors together.

    Args:
        stages: Group of the stages, which update together; None if this rank has all of them.
        counted_elsewhere: Returns parameters of this rank that another stage counts.
    """
    # `clip_grad_norm_` looks these private names up; users may have imported the function itself.
    own_norm, own_clip = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_

    def whole_norm(
        tensors: Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        others = {id(parameter.grad) for parameter in counted_elsewhere()}
        groups = group_alike(tensor for tensor in tensors if id(tensor) not in others)
        own = [whole(own_norm(same, norm_type, False, foreach)) for same in groups or [[]]]
        power = float(norm_type)
        parts = torch.stack([part.double().cpu() for part in own])
        total = parts.amax() if math.isinf(power) else parts.pow(power).sum()
        if stages is not None:
            largest = dist.ReduceOp.MAX if math.isinf(power) else dist.ReduceOp.SUM
            dist.all_reduce(total, largest, group=stages)
        total = total if math.isinf(power) else total.pow(1.0 / power)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(f"The norm of order {norm_type} of the gradients is {total}")
        return total.to(own[0].device, own[0].dtype)

    def clip(
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        total_norm: Tensor,
        foreach: bool | None = None,
    ) -> None:
        several = [parameters] if isinstance(parameters, Tensor) else parameters
        for same in group_alike(with_gradient(several)):
            own_clip(same, max_norm, total_norm, foreach)

    with ExitStack() as undo:
        undo.callback(replace_method(clip_grad, "_get_total_norm", whole_norm))
        undo.callback(replace_method(clip_grad, "_clip_grads_with_norm_", clip))
        undo.callback(replace_method(torch.nn.utils, "get_total_norm", whole_norm))
        yield
