"""Gradient clipping by the norm of the whole model's gradient.

Lightning clips each rank's gradients by their own norm, which on two stages leaves a total norm of
up to sqrt(2) times the bound. The precision plugin is the one place of Lightning's clipping. The
plugin also passes all gradients to torch at once, but torch takes shards or whole tensors, not both
together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_
from torch.optim import Optimizer

from lightning_dist.engine.parallelize.grad_norm import FindNorm
from lightning_dist.engine.tensors.patch import replace_method


def clip_whole_gradient(precision_plugin: Precision, find_norm: FindNorm) -> Callable[[], None]:
    """Makes a precision plugin clip sharded and whole gradients by the norm of all of them.

    Args:
        precision_plugin: The plugin, changed until the returned function is called.
        find_norm: Returns the norm of the whole model's gradient.

    Returns:
        Undoes the change.
    """

    def kinds_of(optimizer: Optimizer) -> list[list[Tensor]]:
        return _alike(p for p in precision_plugin.main_params(optimizer) if p.grad is not None)

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
        kinds = kinds_of(optimizer)
        norm = find_norm(kinds)
        for alike in kinds:
            clip_grads_with_norm_(alike, float(clip_val), norm.to(alike[0].device, alike[0].dtype))

    def clip_grad_by_value(optimizer: Optimizer, clip_val: int | float) -> None:
        for alike in kinds_of(optimizer):
            clip_grad_value_(alike, float(clip_val))

    undo_norm = replace_method(precision_plugin, "clip_grad_by_norm", clip_grad_by_norm)
    undo_value = replace_method(precision_plugin, "clip_grad_by_value", clip_grad_by_value)

    def undo() -> None:
        undo_norm()
        undo_value()

    return undo


def _alike(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups parameters by mesh and placements, for torch's functions that take many tensors."""
    kinds: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        key = None
        if isinstance(parameter, DTensor):
            key = (parameter.device_mesh, parameter.placements)
        kinds.setdefault(key, []).append(parameter)
    return list(kinds.values())
