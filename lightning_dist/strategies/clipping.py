"""Gradient clipping by the norm of the whole model's gradient.

Lightning clips each rank's gradients by their own norm, which on two stages leaves a total norm of
up to sqrt(2) times the bound. The precision plugin is the one place where it does so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_dist.shards import whole


def clip_by_global_norm(
    precision_plugin: Precision, group: dist.ProcessGroup | None = None
) -> Callable[[], None]:
    """Makes a precision plugin clip by the norm over all shards and stages.

    Args:
        precision_plugin: Changed until the returned function is called.
        group: The stages; takes CPU tensors. None where each rank knows all parameters.

    Returns:
        Undoes the change.
    """

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
        parameters = [p for p in precision_plugin.main_params(optimizer) if p.grad is not None]
        norm = _norm([p.grad for p in parameters if p.grad is not None], group)
        clip_grads_with_norm_(parameters, float(clip_val), norm)

    precision_plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign]

    def undo() -> None:
        del precision_plugin.clip_grad_by_norm

    return undo


def _norm(gradients: Sequence[Tensor], group: dist.ProcessGroup | None) -> Tensor:
    norm = whole(get_total_norm(gradients))
    if group is None:
        return norm
    squared = norm.double().square().cpu()
    dist.all_reduce(squared, group=group)
    return squared.sqrt().to(norm)
