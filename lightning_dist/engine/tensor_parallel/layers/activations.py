"""The collectives at the borders of a tensor-parallel region.

Between the input of a ``colwise`` layer and the output of its ``rowwise`` partner each rank has
other features. Outside, the activation is the same on all ranks, or its sequence is sharded. In
either case :func:`enter` and :func:`leave` are a conjugate pair (Megatron-LM, section 3; sequence
parallelism: Korthikanti et al. 2022, section 4.2.2):

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
is the other function of the pair, differentiable too, for a loss that contains gradients.
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

_REPLICATE, _PARTIAL = Replicate(), Partial()


@dataclass(frozen=True)
class Redistribution:
    """A redistribution of an activation, and that of its gradient."""

    forward: tuple[Placement, Placement]  # before, and after
    backward: tuple[Placement, Placement]  # of the gradient
    is_of_sequence: bool = False  # the sequence of the blocks is split or gathered

    @property
    def of_gradient(self) -> Redistribution:
        """The redistribution of the gradient, and that of the gradient's gradient."""
        return Redistribution(self.backward, self.forward, self.is_of_sequence)

    @property
    def enters(self) -> bool:
        """Whether the activation goes into a region."""
        return self.backward[0] == _PARTIAL

    @property
    def sums_up(self) -> bool:
        """Whether the activation comes out of a region."""
        return self.forward[0] == _PARTIAL

    @property
    def cuts(self) -> bool:
        """Whether the sequence is split."""
        return self.is_of_sequence and self.forward[0] == _REPLICATE

    @property
    def joins(self) -> bool:
        """Whether the sequence is gathered."""
        return self.is_of_sequence and self.forward[1] == _REPLICATE


def enter(x: Tensor, mesh: DeviceMesh, dim: int | None = None) -> Tensor:
    """Returns the whole activation, whose gradient is partial on each rank.

    Args:
        x: The activation, the same on all ranks, or this rank's shard.
        mesh: Mesh of the tensor-parallel ranks.
        dim: Dim of the shards; None if all ranks have the same activation.
    """
    outside = _REPLICATE if dim is None else Shard(dim)
    return _cross(x, mesh, Redistribution((outside, _REPLICATE), (_PARTIAL, outside)))


def leave(x: Tensor, mesh: DeviceMesh, dim: int | None = None) -> Tensor:
    """Returns the sum of the ranks' partial activations, or this rank's shard of it.

    Args:
        x: This rank's partial activation.
        mesh: Mesh of the tensor-parallel ranks.
        dim: Dim along which to shard the sum; None for the same sum on all ranks.
    """
    outside = _REPLICATE if dim is None else Shard(dim)
    return _cross(x, mesh, Redistribution((_PARTIAL, outside), (outside, _REPLICATE)))


def gather(x: Tensor, mesh: DeviceMesh, dim: int = -1, *, of_sequence: bool = False) -> Tensor:
    """Returns the whole activation, with which all ranks must compute the same.

    Args:
        x: This rank's shard.
        mesh: Mesh of the tensor-parallel ranks.
        dim: Dim of the shards.
        of_sequence: Whether the dim is the sequence of the blocks.
    """
    shard = Shard(dim % x.dim())
    there = Redistribution((shard, _REPLICATE), (_REPLICATE, shard), of_sequence)
    return _cross(x, mesh, there)


def split(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Returns this rank's shard of the sequence; the inverse of :func:`gather`."""
    there = Redistribution((_REPLICATE, Shard(dim)), (Shard(dim), _REPLICATE), True)
    return _cross(x, mesh, there)


def all_reduce_gradients(parameters: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
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
        missing = [index for index, p in enumerate(group) if p.grad is None]
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in group]
        # Not a tensor of a list, whose copy to an accelerator the host would wait for.
        counts = torch.ones(len(group), dtype=dtype, device=mesh.device_type)
        for index in missing:
            counts[index] = 0
        parts = [*(local_part(gradient) for gradient in own), counts]
        # Gradients of offloaded shards are in host memory.
        flat = torch.cat([part.reshape(-1).to(mesh.device_type) for part in parts])
        dist.all_reduce(flat, group=mesh.get_group())
        *sums, counted = flat.split([part.numel() for part in parts])
        for parameter, gradient, part, summed in zip(group, own, parts, sums, strict=False):
            part.copy_(summed.view_as(part))
            parameter.grad = gradient
        if missing:
            for parameter, count in zip(group, counted.tolist(), strict=True):
                if not count:
                    parameter.grad = None


def _cross(x: Tensor, mesh: DeviceMesh, there: Redistribution) -> Tensor:
    crossed: Tensor = _Crossing.apply(x, mesh, there)  # type: ignore[no-untyped-call]
    return crossed


class _Crossing(torch.autograd.Function):
    """A redistribution whose backward is one too, and so on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, there: Redistribution) -> Tensor:
        ctx.mesh, ctx.redistribution = mesh, there
        source, target = there.forward
        if source == target:
            return x.view_as(x)  # a view, so that autograd refuses a write into the input
        local = DTensor.from_local(x.detach(), mesh, [source], run_check=False)
        # Not a view of a tensor that autograd tracks, so the caller may write into it.
        return local.redistribute(mesh, [target]).to_local().detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        back = ctx.redistribution.of_gradient
        return _cross(gradient.contiguous(), ctx.mesh, back), None, None
