"""Whole tensors from shards, and shards of whole tensors.

A sharded parameter is a ``DTensor``. Checkpoint files hold whole tensors, or let each rank read the
bytes it needs; either way each rank can cut its own part without asking another. Only to put a
whole tensor together must all ranks of its mesh meet.

What of a tensor is on this rank.

Where a rank's rows are in a weight that holds several matrices on top of each other.

Each rank needs its heads of a fused query, key and value, so its rows are no contiguous piece.
torch has a placement for that, made for parameters that are sharded over two axes of a mesh, and
private: no public one describes such rows. A test compares what it cuts out, and puts together
again, with plain indexing. torch 2.11 cuts by it, but refuses to put together: for that the
matrices get a dim of their own, and lie along it as public placements say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_dist.engine.tensors.tree import map_leaves


def local_part(tensor: Tensor) -> Tensor:
    """Gives the values that are on this rank, a view.

    Args:
        tensor: Sharded or not.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def stacked(dim: int, num_stacked: int) -> Placement:
    """Gives the placement of this rank's part of each of some matrices of one size.

    Args:
        dim: Along which they lie on top of each other.
        num_stacked: How many.
    """
    return _StridedShard(dim, split_factor=num_stacked)


def stacked_dim(tensor: Tensor) -> int | None:
    """Gives the dim along which a tensor lies as :func:`stacked` says; None if along none.

    Args:
        tensor: Any.
    """
    # Tensor parallelism is the innermost axis of a mesh.
    placement = tensor.placements[-1] if isinstance(tensor, DTensor) else None
    return int(placement.dim) if isinstance(placement, _StridedShard) else None


def unstacked(tensor: DTensor) -> DTensor:
    """Gives the same values with a dim more, that of the matrices, before the one they lie along.

    Args:
        tensor: As :func:`stacked` says, each rank with as many rows.
    """
    dim, placement = stacked_dim(tensor), tensor.placements[-1]
    assert dim is not None
    assert isinstance(placement, _StridedShard)
    num_stacked = int(placement.split_factor)
    sizes = [num_stacked, tensor.shape[dim] // num_stacked]
    shape = torch.Size([*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :]])
    return DTensor.from_local(
        tensor.to_local().unflatten(dim, (num_stacked, -1)),
        tensor.device_mesh,
        [*(_behind(dim, outer) for outer in tensor.placements[:-1]), Shard(dim + 1)],
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def _behind(dim: int, placement: Placement) -> Placement:
    """Says what a placement says, where another dim has come in."""
    if isinstance(placement, Shard):
        assert placement.dim != dim, "no axis shards what is stacked along the dim"
        return Shard(placement.dim + (placement.dim > dim))
    return placement


def is_spread(tensor: Any) -> bool:
    """Whether a tensor's values are spread over a mesh.

    Args:
        tensor: Anything.
    """
    return isinstance(tensor, DTensor)


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """Cuts this rank's part out of a whole tensor; no rank waits for another.

    Args:
        full: The same on all ranks.
        like: Spread over a mesh as the result shall be, or not; then ``full`` is returned.

    Returns:
        Of the dtype of ``full``, on the device of the mesh.
    """
    if not isinstance(like, DTensor) or isinstance(full, DTensor):
        return full
    return cut(full, like.device_mesh, like.placements)


def cut(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Cuts this rank's part out of a whole tensor; no rank waits for another.

    Args:
        full: The same on all ranks; may be on the meta device.
        mesh: Of the ranks.
        placements: One for each axis of the mesh.

    Returns:
        On the device of the mesh.
    """
    on_device = full.detach()
    if not on_device.is_meta:
        on_device = on_device.to(mesh.device_type)
    # Without a source rank each one takes its part of what it has, in place of a scatter.
    part = distribute_tensor(on_device, mesh, placements, src_data_rank=None)
    # A copy, for a shard can be a view that would keep the whole alive.
    return DTensor.from_local(
        part.to_local().clone(),
        mesh,
        placements,
        run_check=False,
        shape=part.shape,
        stride=part.stride(),
    )


def whole(tensor: Tensor) -> Tensor:
    """Puts a tensor together; all ranks of its mesh must call it.

    Args:
        tensor: Sharded, or not; then it is returned.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    dim = stacked_dim(tensor)
    return (
        tensor.full_tensor()
        if dim is None
        else unstacked(tensor).full_tensor().flatten(dim, dim + 1)
    )


def is_storable(tensor: Tensor) -> bool:
    """Whether a tensor is spread so that each rank has one piece of it.

    Args:
        tensor: Any.
    """
    return isinstance(tensor, DTensor) and stacked_dim(tensor) is None


def storable(tensor: Tensor) -> Tensor:
    """Gives a tensor as distributed checkpoints take it; all ranks of its mesh must call it.

    Args:
        tensor: Any. If a rank has several pieces of it, they become one.
    """
    dim = stacked_dim(tensor)
    if not isinstance(tensor, DTensor) or dim is None:
        return tensor
    apart = unstacked(tensor)
    gathered = apart.redistribute(apart.device_mesh, [*apart.placements[:-1], Replicate()])
    own = gathered.to_local().flatten(dim, dim + 1)
    return DTensor.from_local(
        own,
        tensor.device_mesh,
        [*tensor.placements[:-1], Replicate()],
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def spread_like(own: Tensor, like: Tensor) -> Tensor:
    """Makes a tensor of what each rank has of it; no rank waits for another.

    Args:
        own: The values that are on this rank.
        like: Spread as the result shall be, or not; then ``own`` is returned.
    """
    if not isinstance(like, DTensor):
        return own
    return DTensor.from_local(
        own,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def gather(tree: Any, *, keep: bool) -> Any:
    """Puts the sharded tensors of a tree together; all ranks of their mesh must call it.

    Args:
        tree: Of the same structure on each rank.
        keep: Whether this rank wants the result. Another one takes part in each collective, but
            never holds more than one whole tensor.

    Returns:
        The tree with whole tensors on the CPU for the sharded ones, or None where it is not kept.
    """

    def gathered(leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        full = whole(leaf.detach())
        return full.cpu() if keep else None

    result = map_leaves(gathered, tree)
    return result if keep else None
