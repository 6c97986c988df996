"""What of a tensor is on this rank."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """Gives the values that are on this rank, a view.

    Args:
        tensor: Sharded or not.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
