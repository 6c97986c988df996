"""Gradient clipping by the norm of the whole model's gradient.

Lightning clips each rank's gradients by their own norm, which on two stages leaves a total norm of
up to sqrt(2) times the bound. The precision plugin is the one place of Lightning's clipping, and
passes all gradients at once to torch, which takes shards or whole tensors, not both together.

Users clip by themselves, too: ``torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)`` in
``configure_gradient_clipping``, where a stage's module has that stage's parameters only. So while
stages update together, torch's norm of the gradients is that of all stages, ``get_total_norm`` too.
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

from lightning_dist.engine.parallelize.clip_grad import clip_grad_value_
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
def norms_of_all_stages(
    stages: dist.ProcessGroup, counted_elsewhere: Callable[[], Iterable[Tensor]]
) -> Iterator[None]:
    """Lets torch's ``clip_grad_norm_`` clip by the norm over all stages. Each must call it."""
    # `clip_grad_norm_` looks this private name up; users may have imported the function itself.
    own_norm = clip_grad._get_total_norm

    def norm_of_all(
        tensors: Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        others = {id(parameter.grad) for parameter in counted_elsewhere()}
        counted = [tensor for tensor in tensors if id(tensor) not in others]
        own = whole(own_norm(counted, norm_type, False, foreach))
        power = float(norm_type)
        total = own.double().cpu()
        if math.isinf(power):
            dist.all_reduce(total, dist.ReduceOp.MAX, group=stages)
        else:
            total = total.pow(power)
            dist.all_reduce(total, group=stages)
            total = total.pow(1.0 / power)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(f"The norm of order {norm_type} of all stages' gradients is {total}")
        return total.to(own.device, own.dtype)

    with ExitStack() as undo:
        undo.callback(replace_method(clip_grad, "_get_total_norm", norm_of_all))
        undo.callback(replace_method(torch.nn.utils, "get_total_norm", norm_of_all))
        yield
