r"""The collectives at the borders of a tensor-parallel region.

Between the input of a ``colwise`` layer and the output of its ``rowwise`` partner each rank has
other features. Outside, the activation is the same on all ranks, or its sequence is sharded. The
four functions are conjugate pairs (Megatron-LM, section 3; sequence parallelism: Korthikanti et al.
2022, section 4.2.2):

====================  ==============  =============================  =========================
function              outside         forward                        backward
====================  ==============  =============================  =========================
:func:`enter`         the same        nothing                        all-reduce
:func:`leave`         the same        all-reduce                     nothing
:func:`enter` (dim)   part of a dim   all-gather                     reduce-scatter
:func:`leave` (dim)   part of a dim   reduce-scatter                 all-gather
====================  ==============  =============================  =========================

:func:`gather` gathers shards, :func:`split` is its inverse. All are redistributions of a temporary
``DTensor``, so that the layers, and the user's code between them, see plain tensors. The backward
is not torch's for a ``DTensor``, but the other function of the pair. It is differentiable too, for
a loss that contains gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from lightning_dist.engine.tensors.dtensor import local_part


@dataclass(frozen=True)
class Way:
    """A redistribution of an activation, and that of its gradient.

    Attributes:
        source: Placement of the activation before.
        target: Placement of the activation after.
        back_source: Placement of the gradient before.
        back_target: Placement of the gradient after.
        is_of_sequence: Whether the way splits or gathers the sequence of the blocks.
    """

    source: Placement
    target: Placement
    back_source: Placement
    back_target: Placement
    is_of_sequence: bool = False

    @property
    def back(self) -> Way:
        """The way of gradients."""
        there, back = (self.source, self.target), (self.back_source, self.back_target)
        return Way(*back, *there, self.is_of_sequence)

    @property
    def enters(self) -> bool:
        """Whether the way goes into a region."""
        return self.back_source == _SUMMAND

    @property
    def sums_up(self) -> bool:
        """Whether the way comes out of a region."""
        return self.source == _SUMMAND

    @property
    def cuts(self) -> bool:
        """Whether the way splits the sequence."""
        return self.is_of_sequence and self.source == _SAME

    @property
    def joins(self) -> bool:
        """Whether the way gathers the sequence."""
        return self.is_of_sequence and self.target == _SAME


_SAME: Placement = Replicate()
_SUMMAND: Placement = Partial()


def enter(x: Tensor, mesh: DeviceMesh, dim: int | None = None) -> Tensor:
    """Takes an activation into a region.

    Args:
        x: The activation, the same on all ranks, or this rank's shard.
        mesh: Mesh of the tensor-parallel ranks.
        dim: Dim of the shards; None if all ranks have the same activation.

    Returns:
        The whole activation, whose gradient is partial on each rank.
    """
    outside = _SAME if dim is None else Shard(dim)
    return _cross(x, mesh, Way(outside, _SAME, _SUMMAND, outside))


def leave(x: Tensor, mesh: DeviceMesh, dim: int | None = None) -> Tensor:
    """Takes an activation out of a region.

    Args:
        x: This rank's partial activation.
        mesh: Mesh of the tensor-parallel ranks.
        dim: Dim along which to shard the sum; None for the same sum on all ranks.

    Returns:
        The sum, or this rank's shard of the sum.
    """
    outside = _SAME if dim is None else Shard(dim)
    return _cross(x, mesh, Way(_SUMMAND, outside, outside, _SAME))


def gather(x: Tensor, mesh: DeviceMesh, dim: int = -1, *, of_sequence: bool = False) -> Tensor:
    """Gathers the shards of an activation.

    Args:
        x: This rank's shard.
        mesh: Mesh of the tensor-parallel ranks.
        dim: Dim of the shards.
        of_sequence: Whether the dim is the sequence of the blocks.

    Returns:
        The whole activation, with which all ranks must compute the same.
    """
    part = Shard(dim % x.dim())
    return _cross(x, mesh, Way(part, _SAME, _SAME, part, of_sequence))


def split(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Returns this rank's shard of the sequence; the inverse of :func:`gather`."""
    return _cross(x, mesh, Way(_SAME, Shard(dim), Shard(dim), _SAME, True))


def add_up_gradients(parameters: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
    """All-reduces gradients, in one message per dtype. Collective: every rank must call it.

    Args:
        parameters: The same parameters on all ranks. A rank without a gradient gets the other
            ranks' sum; a parameter without a gradient on any rank stays without.
        mesh: Mesh of the tensor-parallel ranks.
    """
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for dtype, group in by_dtype.items():
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in group]
        counts = torch.tensor([p.grad is not None for p in group], dtype=dtype)
        parts = [*(local_part(gradient) for gradient in own), counts.to(local_part(own[0]).device)]
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(flat, group=mesh.get_group())
        *sums, counted = flat.split([part.numel() for part in parts])
        for parameter, gradient, part, summed in zip(group, own, parts, sums, strict=False):
            part.copy_(summed.view_as(part))
            parameter.grad = gradient
        for parameter, count in zip(group, counted.tolist(), strict=True):
            if not count:
                parameter.grad = None


def _cross(x: Tensor, mesh: DeviceMesh, way: Way) -> Tensor:
    crossed: Tensor = _Crossing.apply(x, mesh, way)  # type: ignore[no-untyped-call]
    return crossed


class _Crossing(torch.autograd.Function):
    """A redistribution whose backward is one too, and so on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, way: Way) -> Tensor:
        ctx.mesh, ctx.way = mesh, way
        if way.source == way.target:
            return x.view_as(x)  # a view, so that autograd refuses a write into the input
        local = DTensor.from_local(x.detach(), mesh, [way.source], run_check=False)
        # Not a view of a tensor that autograd tracks, so the caller may write into it.
        return local.redistribute(mesh, [way.target]).to_local().detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _cross(gradient.contiguous(), ctx.mesh, ctx.way.back), None, None
