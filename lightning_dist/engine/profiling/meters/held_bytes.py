"""How many bytes of each kind a rank holds for training."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from lightning_dist.engine.tensors.local_part import local_part
from lightning_dist.engine.tensors.tree import flatten


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Adds up this rank's memory of tensors; what several share counts once.

    Args:
        tensors: Whole, or shards.
    """
    sizes: dict[int, int] = {}
    for tensor in tensors:
        storage = local_part(tensor.detach()).untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def gradient_bytes(parameters: Iterable[Tensor]) -> int:
    """Adds up the gradients that are there.

    Args:
        parameters: Whose.
    """
    return bytes_of(p.grad for p in parameters if p.grad is not None)


def optimizer_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Adds up what optimizers keep for their parameters, step counts left out.

    Args:
        optimizers: Of this rank.
    """
    kept = (t for o in optimizers for t in flatten([*o.state.values()])[0])
    return bytes_of(t for t in kept if t is not None and t.dim() > 0)
