"""Where a rank's rows are in a weight that holds several matrices on top of each other.

Each rank needs its heads of a fused query, key and value, so its rows are no contiguous piece.
torch has a placement for that, made for parameters that are sharded over two axes of a mesh, and
private: no public one describes such rows. A test compares what it cuts out, and puts together
again, with plain indexing.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement
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
