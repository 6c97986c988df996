"""Where a rank's rows are in a weight that holds several matrices on top of each other.

Each rank needs its heads of a fused query, key and value, so its rows are no contiguous piece.
torch has a placement for that, made for parameters that are sharded over two axes of a mesh, and
private: no public one describes such rows. A test compares what it cuts out, and puts together
again, with plain indexing. torch 2.11 cuts by it, but refuses to put together: for that the
matrices get a dim of their own, and lie along it as public placements say.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard


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
