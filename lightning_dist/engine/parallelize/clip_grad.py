"""Clip the gradient of a whole model, whose parts are on several ranks.

Shards add up their squared norms over the mesh of their tensors, stages over a group of their own.
torch's functions take shards or whole tensors, not both together, so parameters are grouped first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import utils
from torch.nn.utils import get_total_norm

from lightning_dist.engine.common.device_group import DeviceGroup
from lightning_dist.engine.tensors.dtensor import local_part


def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    pp_group: DeviceGroup | None = None,
    exclude: Iterable[Tensor] = (),
    total_norm: Tensor | None = None,
) -> Tensor:
    """Clips gradients by the norm of the whole model's gradient.

    Collective: every rank must call it. The mesh of shards is that of the parameters themselves.

    Args:
        parameters: This rank's parameters, sharded or whole.
        max_norm: Largest norm.
        pp_group: Group of the stages; None if this rank has all of them.
        exclude: Parameters that another stage counts, which are clipped too.
        total_norm: The norm, if it is known already.

    Returns:
        The norm of the whole gradient before clipping.
    """
    alike = group_alike(with_gradient(parameters))
    if total_norm is None:
        total_norm = _total_norm(alike, pp_group, {id(parameter) for parameter in exclude})
    for group in alike:
        norm = total_norm.to(group[0].device, group[0].dtype.to_real())  # of complex ones too
        utils.clip_grads_with_norm_(group, max_norm, norm)
    return total_norm


def clip_grad_value_(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Clips each element of the gradients of this rank's parameters, sharded or whole."""
    for group in group_alike(with_gradient(parameters)):
        utils.clip_grad_value_(group, clip_value)


class AsyncGradNorm:
    """All-reduces gradient norms over the stages while they compute, before an update is due.

    A stage has an update's gradients some micro-batches before the update, later stages earlier.
    So each stage starts the all-reduce as soon as it has its gradients. It waits for the sum when
    it clips; on a GPU its stream waits, not the host. By then all stages have joined the
    all-reduce, if a batch has at least as many micro-batches as there are stages after the first.
    Then the gradients that the last stage sends for a batch reach the first stage before the last
    stage ends its next batch.

    Args:
        group: Group of the stages, for no other use.
    """

    def __init__(self, group: DeviceGroup) -> None:
        self._group = group
        self._pending: dict[int, tuple[dist.Work, Tensor]] = {}

    def post(self, update: int, gradients: Iterable[Tensor]) -> None:
        """Starts the all-reduce of an update's norm; does not wait for the other stages."""
        if update == 0:
            self._pending.clear()  # norms from before the drain that no update has read
        own = list(gradients)
        squared = torch.zeros((), dtype=torch.float64, device=self._group.device)
        if own:
            squared += _squared_norm(own).to(squared.device)
        work = dist.all_reduce(squared, group=self._group.group, async_op=True)
        assert work is not None
        self._pending[update] = (work, squared)

    def of(self, update: int) -> Tensor:
        """Returns the norm of an update's gradient; waits for all stages."""
        work, squared = self._pending[update]
        work.wait()
        self._pending = {u: pending for u, pending in self._pending.items() if u > update}
        return squared.sqrt()


def group_alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups tensors by mesh and placements: torch's functions of several take no others."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        key: Any = None
        if isinstance(tensor, DTensor):
            key = (tensor.device_mesh, tensor.placements)
        groups.setdefault(key, []).append(tensor)
    return list(groups.values())


def with_gradient(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Lists the parameters that have a gradient."""
    return [parameter for parameter in parameters if parameter.grad is not None]


def _total_norm(
    alike: Sequence[Sequence[Tensor]], group: DeviceGroup | None, excluded: set[int]
) -> Tensor:
    counted = ([p for p in same if id(p) not in excluded] for same in alike)
    gradients = ([p.grad for p in same if p.grad is not None] for same in counted)
    squared = [_squared_norm(own) for own in gradients if own]
    where = [part.device for part in squared] if group is None else [group.device]
    total = torch.zeros((), dtype=torch.float64, device=where[0] if where else "cpu")
    for part in squared:
        total += part.to(total.device)
    if group is not None:
        dist.all_reduce(total, group=group.group)
    return total.sqrt()


def _squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    own = get_total_norm([_elements(g) for g in gradients]).double().square()
    first = gradients[0]
    if not isinstance(first, DTensor):
        return own
    placements = [Replicate() if p.is_replicate() else Partial() for p in first.placements]
    return DTensor.from_local(own, first.device_mesh, placements, run_check=False).full_tensor()


def _elements(gradient: Tensor) -> Tensor:
    """Returns this rank's elements, of a sparse gradient those that are not zero."""
    return gradient.coalesce().values() if gradient.is_sparse else local_part(gradient)
