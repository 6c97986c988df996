"""Whose memory a gradient is in.

Autograd gives a leaf what arrives there, without a copy, where nobody else holds that tensor; it
does not ask who else has its memory. The gradient of ``p`` in ``x + p[None]`` is a view of what the
stage behind has sent, and so is that of ``x``, which goes to the stage before. Whatever is added to
the one later would change the other on its way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from lightning_dist.engine.tensors.local_part import local_part


def have_shared_memory(
    gradients: Sequence[Tensor | None], others: Sequence[Tensor | None]
) -> list[bool]:
    """Tells for each of some gradients whether its memory is that of another tensor, too.

    Args:
        gradients: Compared with each other, and with the others.
        others: Only compared with.
    """
    users = Counter(_memory_of(tensor) for tensor in (*gradients, *others) if tensor is not None)
    return [g is not None and users[_memory_of(g)] > 1 for g in gradients]


def _memory_of(tensor: Tensor) -> object:
    # A storage is the same object for all tensors in it, as long as one reference to it is held;
    # an address would be none where tensors have no values.
    return tensor if tensor.is_sparse else local_part(tensor).untyped_storage()
