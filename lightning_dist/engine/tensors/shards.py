"""Whole tensors from shards, and shards of whole tensors.

A sharded parameter is a ``DTensor``. Checkpoint files hold whole tensors, or let each rank read the
bytes it needs; either way each rank can cut its own part without asking another. Only to put a
whole tensor together must all ranks of its mesh meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from lightning_dist.engine.tensors.placements import stacked_dim, unstacked
from lightning_dist.engine.tensors.tree import map_leaves


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
