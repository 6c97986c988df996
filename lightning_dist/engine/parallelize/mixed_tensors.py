"""Parameter groups that mix DTensors and plain tensors.

``fused=True`` and ``foreach=True`` update a whole group in a few calls, and torch refuses calls
that mix both. A tensor-parallel model's norms are plain and its projections DTensors. Such a group
is updated one parameter at a time, as an optimizer does without ``fused`` and ``foreach``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from lightning_dist.engine.tensors.dtensor import is_dtensor

_WAYS = ("foreach", "fused")


def update_mixed_groups_singly(optimizer: Optimizer) -> None:
    """Turns ``foreach`` and ``fused`` off for each mixed group while a step runs, and warns once.

    Between steps the groups keep the values that the user has set.
    """
    asked_for: list[tuple[dict[str, Any], str, Any]] = []

    def before(*_: object) -> None:
        after()  # the post hook has not run if the last step failed
        for group in optimizer.param_groups:
            for way in _ways_that_fail(group):
                asked_for.append((group, way, group[way]))
                group[way] = False

    def after(*_: object) -> None:
        for group, way, value in asked_for:
            group[way] = value
        asked_for.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if is_first and any(_ways_that_fail(group) for group in optimizer.param_groups):
        warnings.warn(
            f"{type(optimizer).__name__} was asked for `fused` or `foreach`, but torch cannot"
            " update tensor-parallel parameters and others in one call. Groups that have both are"
            " updated one parameter at a time; give either kind a group of its own to avoid that.",
            stacklevel=2,
        )


def _ways_that_fail(group: dict[str, Any]) -> list[str]:
    asked_for = [way for way in _WAYS if group.get(way)]
    if not asked_for or len({is_dtensor(parameter) for parameter in group["params"]}) < 2:
        return []
    return asked_for


_TORCH_SAYS = "got mixed torch.Tensor and DTensor"


@contextmanager
def reraise_mixed_dtensor_error() -> Iterator[None]:
    """Raises torch's error about mixed DTensors and plain tensors again, with advice."""
    try:
        yield
    except RuntimeError as error:
        if _TORCH_SAYS not in str(error):
            raise
        raise ValueError(
            "A step has computed with a parameter itself beside other tensors, a penalty on weights"
            " for instance, and each rank has a part of it only. Use the optimizer's weight_decay"
            " for that, or compute it inside of the layer that has the parameter."
            f" ({str(error).splitlines()[0]})"
        ) from error
