r"""How an activation crosses the borders of a tensor-parallel region.

Between the input of a ``colwise`` layer and the output of its ``rowwise`` partner each rank has
other features. Outside, all ranks have the same activation, or each its part of the sequence. The
four ways in and out are conjugate pairs (Megatron-LM, section 3; sequence parallelism: Korthikanti
et al. 2022, section 4.2.2):

====================  ==============  =============================  =========================
function              outside         forward                        backward
====================  ==============  =============================  =========================
:func:`enter`         the same        nothing                        all-reduce
:func:`leave`         the same        all-reduce                     nothing
:func:`enter` (dim)   part of a dim   all-gather                     reduce-scatter
:func:`leave` (dim)   part of a dim   reduce-scatter                 all-gather
====================  ==============  =============================  =========================

:func:`gather` joins what was computed apart, :func:`split` is its inverse. All are redistributions
of a ``DTensor`` that lives for a moment only, so that the layers, and whatever the user does
between them, see plain tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from lightning_dist.local_part import local_part


def enter(x: Tensor, mesh: DeviceMesh, dim: int | None = None) -> Tensor:
    """Takes an activation into a region.

    Args:
        x: The same on all ranks, or this rank's part of it.
        mesh: The tensor-parallel ranks.
        dim: Along which each rank has a part; None where all have the same.

    Returns:
        The whole activation. Each rank's gradient of it is a summand.
    """
    outside: Placement = Replicate() if dim is None else Shard(dim)
    whole = _from_local(x, mesh, outside).redistribute(mesh, [Replicate()])
    return whole.to_local(grad_placements=[Partial()])


def leave(x: Tensor, mesh: DeviceMesh, dim: int | None = None) -> Tensor:
    """Takes an activation out of a region.

    Args:
        x: This rank's summand.
        mesh: The tensor-parallel ranks.
        dim: Along which each rank shall have a part; None where all shall have the same.

    Returns:
        The sum, or this rank's part of it.
    """
    outside: Placement = Replicate() if dim is None else Shard(dim)
    return _to_local(_from_local(x, mesh, Partial()).redistribute(mesh, [outside]))


def gather(x: Tensor, mesh: DeviceMesh, dim: int = -1) -> Tensor:
    """Joins what the ranks have computed apart.

    Args:
        x: This rank's part.
        mesh: The tensor-parallel ranks.
        dim: Along which the parts lie.

    Returns:
        The whole, the same on all ranks, each of which goes on with it in the same way.
    """
    parts = _from_local(x, mesh, Shard(dim % x.dim()))
    return _to_local(parts.redistribute(mesh, [Replicate()]))


def split(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Gives each rank its part of an activation that all ranks have; undone by :func:`gather`.

    Args:
        x: The same on all ranks.
        mesh: The tensor-parallel ranks.
        dim: Along which to cut.
    """
    return _to_local(_from_local(x, mesh, Replicate()).redistribute(mesh, [Shard(dim)]))


def add_up(tensors: Sequence[Tensor], mesh: DeviceMesh) -> None:
    """Adds tensors up over the ranks, in place and in one message for each dtype.

    Args:
        tensors: Each rank's summands, in the same order.
        mesh: The tensor-parallel ranks.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(local_part(tensor))
    for parts in by_dtype.values():
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(flat, group=mesh.get_group())
        for part, summed in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
            part.copy_(summed.view_as(part))


def _from_local(x: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    x = x if torch.is_grad_enabled() else x.detach()  # it may be a parameter
    return DTensor.from_local(x, mesh, [placement], run_check=False)


def _to_local(x: DTensor) -> Tensor:
    local: Tensor = _NoView.apply(x.to_local())  # type: ignore[no-untyped-call]
    return local


class _NoView(torch.autograd.Function):
    """Lets the user write into a tensor, as autograd forbids for what a ``DTensor`` gives out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
