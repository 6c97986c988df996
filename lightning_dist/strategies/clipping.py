"""Gradient clipping by the norm of the whole model's gradient.

Lightning clips each rank's gradients by their own norm, which on two stages leaves a total norm of
up to sqrt(2) times the bound. The precision plugin is the one place where it does so. It also hands
all gradients to torch at once, which takes shards or whole tensors, but not both together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_dist.local_part import local_part
from lightning_dist.replaced_method import replace_method

FindNorm = Callable[[Sequence[Sequence[Tensor]]], Tensor]
"""Takes the parameters, grouped by how they are spread; gives the norm of the whole gradient."""


def clip_whole_gradient(precision_plugin: Precision, find_norm: FindNorm) -> Callable[[], None]:
    """Makes a precision plugin clip what is spread and what is not, by the norm of all of it.

    Args:
        precision_plugin: Changed until the returned function is called.
        find_norm: Finds that norm.

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


def norm_over(group: dist.ProcessGroup | None = None) -> FindNorm:
    """Gives what adds up the norms of all shards, and of all stages when they are asked.

    Args:
        group: The stages; takes CPU tensors. None where each rank knows all parameters.
    """
    return lambda kinds: _norm(kinds, group)


def leaving_out(copies: Callable[[], Iterable[Tensor]], find_norm: FindNorm) -> FindNorm:
    """Leaves out of a norm what another rank counts.

    Args:
        copies: Lists the parameters that are not counted here.
        find_norm: Finds the norm of the others.
    """

    def find(kinds: Sequence[Sequence[Tensor]]) -> Tensor:
        others = {id(parameter) for parameter in copies()}
        counted = [[p for p in alike if id(p) not in others] for alike in kinds]
        return find_norm([alike for alike in counted if alike])

    return find


class NormsAhead:
    """Norms that the stages agree on while they work, for updates that are not yet due.

    A stage has an update's gradients some micro-batches before the update, and the later stages
    have them earlier. So each adds its own to a sum as soon as it can, which gloo's threads do, and
    waits for the sum when it clips. By then all stages have joined it: with as many micro-batches
    per batch as there are stages after the first, what the last stage sends back when its batch is
    complete has come to the first one before the last has ended its next batch.

    Args:
        group: The stages; takes CPU tensors.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._pending: dict[int, tuple[dist.Work, Tensor]] = {}

    def post(self, update: int, gradients: Iterable[Tensor]) -> None:
        """Joins the sum; returns at once.

        Args:
            update: Which, counted since the last drain.
            gradients: Of this stage.
        """
        if update == 0:
            self._pending.clear()  # nobody has asked for them
        own = list(gradients)
        squared = _squared_norm(own).cpu() if own else torch.zeros((), dtype=torch.float64)
        work = dist.all_reduce(squared, group=self._group, async_op=True)
        assert work is not None
        self._pending[update] = (work, squared)

    def of(self, update: int) -> Tensor:
        """Waits for a norm.

        Args:
            update: Which; earlier ones are forgotten.
        """
        work, squared = self._pending[update]
        work.wait()
        self._pending = {u: pending for u, pending in self._pending.items() if u > update}
        return squared.sqrt()


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
