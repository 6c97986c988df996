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
between them, see plain tensors. The backward is not torch's for a ``DTensor``, but the other one of
the pair, which is differentiable as the first was: a loss may have gradients in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from lightning_dist.engine.tensors.dtensor import local_part


@dataclass(frozen=True)
class Way:
    """From which placement to which, and how gradients come back.

    Attributes:
        source: Before.
        target: Behind.
        back_source: Of a gradient.
        back_target: What becomes of it.
        is_of_sequence: Whether it cuts or joins the sequence that goes through the blocks.
    """

    source: Placement
    target: Placement
    back_source: Placement
    back_target: Placement
    is_of_sequence: bool = False

    @property
    def back(self) -> Way:
        """That of gradients."""
        there, back = (self.source, self.target), (self.back_source, self.back_target)
        return Way(*back, *there, self.is_of_sequence)

    @property
    def enters(self) -> bool:
        """Whether it goes into a region."""
        return self.back_source == _SUMMAND

    @property
    def sums_up(self) -> bool:
        """Whether it comes out of a region."""
        return self.source == _SUMMAND

    @property
    def cuts(self) -> bool:
        """Whether it gives each rank a part of the sequence."""
        return self.is_of_sequence and self.source == _SAME

    @property
    def joins(self) -> bool:
        """Whether it makes the sequence whole."""
        return self.is_of_sequence and self.target == _SAME


_SAME, _SUMMAND = Replicate(), Partial()
_IN = Way(_SAME, _SAME, _SUMMAND, _SAME)
_OUT = Way(_SUMMAND, _SAME, _SAME, _SAME)


def way_of(node: Node) -> Way | None:
    """Gives how an activation crossed a border at a node of a graph, if it did.

    Args:
        node: Any.
    """
    way = getattr(node, "way", None)
    return way if isinstance(way, Way) else None


def enter(x: Tensor, mesh: DeviceMesh, dim: int | None = None) -> Tensor:
    """Takes an activation into a region.

    Args:
        x: The same on all ranks, or this rank's part of it.
        mesh: The tensor-parallel ranks.
        dim: Along which each rank has a part; None where all have the same.

    Returns:
        The whole activation. Each rank's gradient of it is a summand.
    """
    return _cross(x, mesh, _IN if dim is None else Way(Shard(dim), _SAME, _SUMMAND, Shard(dim)))


def leave(x: Tensor, mesh: DeviceMesh, dim: int | None = None) -> Tensor:
    """Takes an activation out of a region.

    Args:
        x: This rank's summand.
        mesh: The tensor-parallel ranks.
        dim: Along which each rank shall have a part; None where all shall have the same.

    Returns:
        The sum, or this rank's part of it.
    """
    return _cross(x, mesh, _OUT if dim is None else Way(_SUMMAND, Shard(dim), Shard(dim), _SAME))


def gather(x: Tensor, mesh: DeviceMesh, dim: int = -1, *, of_sequence: bool = False) -> Tensor:
    """Joins what the ranks have computed apart.

    Args:
        x: This rank's part.
        mesh: The tensor-parallel ranks.
        dim: Along which the parts lie.
        of_sequence: Whether they are of the sequence that goes through the blocks.

    Returns:
        The whole, the same on all ranks, each of which goes on with it in the same way.
    """
    part = Shard(dim % x.dim())
    return _cross(x, mesh, Way(part, _SAME, _SAME, part, of_sequence))


def split(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Gives each rank its part of the sequence, which all ranks have; undone by :func:`gather`.

    Args:
        x: The same on all ranks.
        mesh: The tensor-parallel ranks.
        dim: Along which to cut.
    """
    return _cross(x, mesh, Way(_SAME, Shard(dim), Shard(dim), _SAME, True))


def add_up_gradients(parameters: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
    """Adds gradients up over the ranks, in one message for each dtype.

    Args:
        parameters: The same on all ranks. One that has no gradient on some of them gets the sum of
            the others, and one that has none on any stays without.
        mesh: The tensor-parallel ranks.
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
            return x.view_as(x)  # a view, so that autograd lets nobody write into what it was
        local = DTensor.from_local(x.detach(), mesh, [way.source], run_check=False)
        # Not a view of anything that autograd knows: who gets it may write into it.
        return local.redistribute(mesh, [way.target]).to_local().detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _cross(gradient.contiguous(), ctx.mesh, ctx.way.back), None, None
