"""A process group together with the device of its tensors, and the backends that take them.

A rank that has nothing to contribute, such as a stage without gradients, must still join a
collective with a tensor on the right device. A group itself does not tell which one that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NEVER = timedelta(days=365)
"""Timeout of groups in which a rank may wait for hours, with a time limit of its own or none."""


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """A process group for tensors of one device."""

    group: dist.ProcessGroup
    device: torch.device  # of this rank's tensors

    @property
    def size(self) -> int:
        """The number of ranks."""
        return dist.get_world_size(self.group)


def check_backend(backend: str, device_type: str) -> None:
    """Checks that a backend takes tensors of a device; reads nothing that differs between ranks.

    Raises:
        ValueError: The backend is unknown, was not built into torch, or takes no such tensors.
    """
    takers = {n for n, types in dist.Backend.backend_capability.items() if device_type in types}
    usable = sorted(name for name in takers - {"fake"} if dist.is_backend_available(name))
    if backend not in usable:
        raise ValueError(
            f"process_group_backend={backend!r} is no backend for tensors on a {device_type!r}"
            f" device in this build of torch. Use one of {usable}, or None for the device's own."
        )


def finish(device: torch.device) -> None:
    """Waits for the collectives queued on a device; on a CPU they are over already."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def reduce_tensor(
    tensor: Tensor, group: dist.ProcessGroup, reduce_op: dist.ReduceOp | str | None
) -> Tensor:
    """Reduces a tensor over the ranks of a group for its device, not in place. Collective.

    The operation is ``"mean"``, ``"sum"``, ``"min"``, ``"max"`` or a ``ReduceOp``. The mean of an
    integer tensor is floating, and of the default dtype.
    """
    if dist.get_world_size(group) == 1:
        return tensor
    name = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
    is_mean = name in ("mean", "avg", dist.ReduceOp.AVG)
    value = tensor.detach().clone()
    if is_mean and not value.is_floating_point():
        value = value.long()  # a sum of few bits would overflow
    op = getattr(dist.ReduceOp, name.upper()) if isinstance(name, str) and not is_mean else name
    dist.all_reduce(value, op=dist.ReduceOp.SUM if is_mean else op, group=group)
    if is_mean:
        value = value / dist.get_world_size(group)
    return value


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns the values of all ranks of a gloo group, in their order. Collective."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def gather_tensor(tensor: Tensor, group: dist.ProcessGroup, *, sync_grads: bool) -> Tensor:
    """Stacks tensors of the same shape on each rank of a group, along a new dim 0. Collective.

    With ``sync_grads`` the result is differentiable: a tensor's gradient is the sum of what all
    ranks compute of it, and their backwards must run alike.
    """
    with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
        return _Gather.apply(tensor, group)  # type: ignore[no-untyped-call, no-any-return]


class _Gather(torch.autograd.Function):
    # torch.distributed.nn's own fails on gloo in a group without rank 0.

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, own = group, tensor.contiguous()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own, group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None
