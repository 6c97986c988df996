"""A number that tells one batch from another, to find stages that read different data.

The first stage takes a batch's inputs, the last its targets. When a user's sampler, augmentation or
masking draws from random numbers that differ between processes, the two belong to different samples
and training goes wrong without a sign. So each activation carries the fingerprint of the batch it
was made from, and the stage that receives it compares.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from lightning_dist.tree import flatten

_SAMPLED_ELEMENTS = 64


def fingerprint(batch: Any, *, read_devices: bool) -> int:
    """Hashes the shapes and dtypes of a batch's tensors, and some of their elements.

    Args:
        batch: Any tree.
        read_devices: Whether to look at elements that are not in host memory, which waits for the
            device.

    Returns:
        A number of 32 bits.
    """
    digest = 0
    for tensor in flatten(batch)[0]:
        digest = zlib.crc32(repr((tuple(tensor.shape), tensor.dtype)).encode(), digest)
        if tensor.layout == torch.strided and (read_devices or tensor.device.type == "cpu"):
            digest = zlib.crc32(_sample(tensor), digest)
    return digest


def _sample(tensor: Tensor) -> bytes:
    """Takes elements from all over a tensor."""
    elements = tensor.detach().reshape(-1)
    some = elements[:: max(1, len(elements) // _SAMPLED_ELEMENTS)]
    return some.cpu().contiguous().view(torch.uint8).numpy().tobytes()
