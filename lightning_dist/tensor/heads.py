"""How many attention heads a rank has.

A projection to queries, keys or values is cut between heads. The module around it counts its heads,
usually in an attribute, and reshapes by that count: on each rank it must be that of its own heads.
"""

from __future__ import annotations

import math

from torch import nn

_HEADS = (
    "num_heads",
    "n_heads",
    "n_head",
    "nhead",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "n_kv_head",
    "n_local_heads",
)
_FEATURES = ("all_head_size", "split_size", "inner_dim")
"""Sizes of all heads together."""


def check_heads(name: str, attention: nn.Module, tp_size: int) -> None:
    """Checks that each rank gets whole heads.

    Args:
        name: Of the module, for the error.
        attention: Holds the projections.
        tp_size: Tensor-parallel ranks.

    Raises:
        ValueError: It does not.
    """
    counts = _counts(attention, _HEADS) | _counts(getattr(attention, "config", None), _HEADS)
    for attribute, count in counts.items():
        if count % tp_size:
            common = math.gcd(*counts.values())
            sizes = [size for size in range(1, common + 1) if common % size == 0]
            raise ValueError(
                f"The {attribute}={count} of {name!r} cannot be shared out over tp_size={tp_size}"
                f" ranks. Use one of the sizes {sizes}, or another number of heads."
            )


def keep_own_heads(attention: nn.Module, tp_size: int) -> None:
    """Makes a module count this rank's heads only.

    Args:
        attention: Changed; see :func:`check_heads`.
        tp_size: Tensor-parallel ranks.
    """
    for attribute, count in _counts(attention, _HEADS + _FEATURES).items():
        setattr(attention, attribute, count // tp_size)


def _counts(holder: object, names: tuple[str, ...]) -> dict[str, int]:
    found = {name: getattr(holder, name, None) for name in names}
    return {name: count for name, count in found.items() if isinstance(count, int)}
