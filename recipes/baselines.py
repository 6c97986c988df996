"""Baselines of a language model: byte statistics counted on the training split.

Both baselines are add-alpha smoothed counts, scored on the validation split in bits per byte, the
unit in which the model's loss is reported too.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUM_BYTES = 256


def unigram_bits_per_byte(train: Tensor, val: Tensor, alpha: float = 0.1) -> float:
    """Scores the frequency of each byte.

    Args:
        train: Training text, ``(N,)`` integers below 256.
        val: Validation text, ``(M,)``.
        alpha: Number added to each count.

    Returns:
        Bits per byte of the validation text.
    """
    counts = torch.bincount(train, minlength=NUM_BYTES).double() + alpha
    return float(-(counts / counts.sum()).log2()[val].mean())


def bigram_bits_per_byte(train: Tensor, val: Tensor, alpha: float = 0.1) -> float:
    """Scores the frequency of each byte after the byte before it.

    Args:
        train: Training text, ``(N,)`` integers below 256.
        val: Validation text, ``(M,)``; its first byte has no byte before it and is not scored.
        alpha: Number added to each count.

    Returns:
        Bits per byte of the validation text.
    """
    pairs = train[:-1] * NUM_BYTES + train[1:]
    counts = torch.bincount(pairs, minlength=NUM_BYTES**2).double() + alpha
    table = counts.view(NUM_BYTES, NUM_BYTES)
    bits = -(table / table.sum(dim=1, keepdim=True)).log2()
    return float(bits[val[:-1], val[1:]].mean())
