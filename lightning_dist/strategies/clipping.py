"""Gradient clipping by the norm of the whole model's gradient.

Lightning clips each rank's gradients by their own norm, which on two stages leaves a total norm of
up to sqrt(2) times the bound. The precision plugin is the one place where it does so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_dist.shards import local_part


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
        kinds = _alike(parameters)
        norm = _norm(kinds, group)
        for alike in kinds:
            clip_grads_with_norm_(alike, float(clip_val), norm.to(alike[0].device, alike[0].dtype))

    precision_plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign]

    def undo() -> None:
        del precision_plugin.clip_grad_by_norm

    return undo


def _alike(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups what torch's functions for many tensors take together: spread in one way, or not."""
    kinds: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        key = None
        if isinstance(parameter, DTensor):
            key = (parameter.device_mesh, parameter.placements)
        kinds.setdefault(key, []).append(parameter)
    return list(kinds.values())


def _norm(kinds: Sequence[Sequence[Tensor]], group: dist.ProcessGroup | None) -> Tensor:
    squared = [_squared_norm([p.grad for p in alike if p.grad is not None]) for alike in kinds]
    stays = group is None and squared  # waiting for a GPU only where others wait for its norm
    total = torch.zeros((), dtype=torch.float64, device=squared[0].device if stays else "cpu")
    for summand in squared:
        total += summand.to(total.device)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def _squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    own = get_total_norm([local_part(g) for g in gradients]).double().square()
    first = gradients[0]
    if not isinstance(first, DTensor):
        return own
    summands = [Replicate() if p.is_replicate() else Partial() for p in first.placements]
    return DTensor.from_local(own, first.device_mesh, summands, run_check=False).full_tensor()
