"""The number of attention heads of a rank.

A projection to queries, keys or values is sharded between heads. The module around it has the
number of heads, usually in an attribute, and reshapes by this number. On each rank it must be the
number of the rank's own heads.
"""

from __future__ import annotations

import inspect
import math

from torch import nn

from lightning_dist.engine.tensor_parallel.layers.own_width import show_own_width
from lightning_dist.engine.tensors.forward_ast import attributes_read, mixes_widths, reads_width

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
    "n_local_kv_heads",
    "heads",
)
_FEATURES = ("all_head_size", "split_size", "inner_dim")
"""Names of attributes with the width of all heads."""
_FEATURES_OF_ONE = (
    "head_dim",
    "head_size",
    "attention_head_size",
    "dim_head",
    "dim_per_head",
    "size_per_head",
    "key_value_proj_dim",
    "d_head",
    "d_k",
)
_WIDTH_WORDS = ("emb", "dim", "hidden", "width", "d_model", "d_out", "features", "channels")
"""Words in names of attributes that may be the width of all heads."""
_LENGTH_WORDS = ("max", "len", "pos", "block", "seq", "vocab", "rotary", "head")
_NORMS_BEFORE = ("norm", "pre_norm", "prenorm", "ln", "layer_norm", "layernorm", "input_layernorm")
_UNRELATED = ("layer", "rotary", "num_key_value_groups", "n_rep", "sliding_window", "window_size")


def check_heads(name: str, attention: nn.Module, tp_size: int) -> None:
    """Checks that each rank gets whole heads."""
    counts = _all_counts(attention)
    for attribute, count in counts.items():
        if count % tp_size:
            common = math.gcd(*counts.values())
            sizes = [size for size in range(1, common + 1) if common % size == 0]
            raise ValueError(
                f"Use a tp_size of {sizes}, or another number of heads, or a plan={{...}} without"
                f" the attention: the {attribute}={count} of {name!r} cannot be shared out over"
                f" tp_size={tp_size} ranks."
            )


def indivisible_heads(attention: nn.Module) -> str:
    """Returns the reason why no number of ranks can share out the heads; empty if one can."""
    counts = _all_counts(attention)
    if math.gcd(*counts.values()) != 1:
        return ""
    listed = ", ".join(f"{attribute}={count}" for attribute, count in counts.items())
    return f"no number of ranks divides its heads ({listed})"


def keep_own_heads(attention: nn.Module, features: int, tp_size: int) -> None:
    """Sets a module's numbers and widths of heads to those of this rank."""
    if count_heads(attention, features) is not None:
        show_own_width(attention, features, tp_size)
    own = (*_HEADS, *_FEATURES, *_widths(attention, features))
    for attribute, count in _counts(attention, own).items():
        setattr(attention, attribute, count // tp_size)


def needs_proof(attention: nn.Module, features: int) -> bool:
    """Returns whether an attention computes with a width, so that it must be verified."""
    if count_heads(attention, features) is None:
        return False
    mixes = mixes_widths(attention, _HEADS, _FEATURES, features)
    return mixes or reads_width(attention) or bool(norms_before(attention))


def norms_before(attention: nn.Module) -> list[nn.Module]:
    """Lists the norms that an attention seems to have before its projections."""
    # A norm that runs after them fails with some of the heads, which the verification detects.
    children = attention.named_children()
    return [
        part
        for name, part in children
        if name in _NORMS_BEFORE and "norm" in type(part).__name__.lower()
    ]


def count_heads(attention: nn.Module, features: int) -> int | None:
    """Returns the number of heads, if the module has it in an attribute that can be changed."""
    counts = _counts(attention, _HEADS)
    sizes = _counts(attention, _FEATURES_OF_ONE)
    if counts:
        heads = max(counts.values())
    elif sizes:
        heads = features // next(iter(sizes.values()))
    else:
        return None
    if heads == 0 or features % heads or _counts_elsewhere(attention, {*counts.values(), heads}):
        return None
    return heads


def uncounted(attention: nn.Module, features: int) -> str:
    """Returns the reason why :func:`count_heads` returns None."""
    counts = _counts(attention, _HEADS)
    if not counts and not _counts(attention, _FEATURES_OF_ONE):
        return "it does not say in an attribute how many heads it has; set self.num_heads"
    heads = max(counts.values(), default=0)
    if heads and features % heads:
        return f"its {heads} heads do not divide the {features} features of its projections"
    return "it counts its heads in more than one place; read only self.num_heads in its forward"


def _widths(attention: nn.Module, features: int) -> list[str]:
    """Names the attributes that the forward reads as the width of all heads."""
    if count_heads(attention, features) is None:
        return []
    return [
        name
        for name in attributes_read(attention)
        if vars(attention).get(name) == features
        and any(word in name.lower() for word in _WIDTH_WORDS)
        and not any(word in name.lower() for word in _LENGTH_WORDS)
    ]


def _counts_elsewhere(attention: nn.Module, counts: set[int]) -> bool:
    """Returns whether the module has a number of heads that would not be changed."""
    forward = inspect.unwrap(type(attention).forward)
    names_read = set(getattr(getattr(forward, "__code__", None), "co_names", ()))
    reads_config = any(name in names_read and not hasattr(attention, name) for name in _HEADS)
    known = _HEADS + _FEATURES + _FEATURES_OF_ONE
    others = [
        value
        for name, value in vars(attention).items()
        if type(value) is int and name not in known and not name.startswith(_UNRELATED)
    ]
    return reads_config or any(value in counts for value in others if value > 1)


def _all_counts(attention: nn.Module) -> dict[str, int]:
    config = getattr(attention, "config", None)
    return _counts(attention, _HEADS) | _counts(config, _HEADS)


def _counts(holder: object, names: tuple[str, ...]) -> dict[str, int]:
    found = {name: getattr(holder, name, None) for name in names}
    return {name: count for name, count in found.items() if type(count) is int}
