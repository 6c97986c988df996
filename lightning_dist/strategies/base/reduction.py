"""Reduce one tensor over a gloo group, as Lightning names the ways to do so."""

from __future__ import annotations

import torch.distributed as dist
from lightning.fabric.utilities.types import ReduceOp
from torch import Tensor


def reduce_tensor(
    tensor: Tensor, group: dist.ProcessGroup, reduce_op: ReduceOp | str | None
) -> Tensor:
    """Reduces a tensor over the ranks of a group; each must call it.

    Args:
        tensor: Of any device; it stays as it is.
        group: A gloo group.
        reduce_op: ``"mean"``, ``"sum"``, ``"min"``, ``"max"`` or a torch ``ReduceOp``.

    Returns:
        The result on the tensor's device; a mean of whole numbers is of floating point.
    """
    if dist.get_world_size(group) == 1:
        return tensor
    name = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
    is_mean = name in ("mean", "avg", ReduceOp.AVG)
    value = tensor.detach().to("cpu", copy=True)
    if is_mean and not value.is_floating_point():
        value = value.double()
    op = getattr(ReduceOp, name.upper()) if isinstance(name, str) and not is_mean else name
    dist.all_reduce(value, op=ReduceOp.SUM if is_mean else op, group=group)
    if is_mean:
        value /= dist.get_world_size(group)
    return value.to(tensor.device)
