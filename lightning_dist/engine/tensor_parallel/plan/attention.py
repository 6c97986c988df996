"""Finds the projections of an attention by the usual names, and checks that heads can be sharded.

Names and sizes show the projections, but not the computation between them. An attention is left
whole if it could be silently wrong with some of the heads. That is so with parameters and buffers
outside of the projections (a bias for each head, a slope, a gate), with a bias that is passed in
from outside, and with a number of heads that no attribute has.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator

from torch import Tensor, nn

from lightning_dist.engine.tensor_parallel.layers.projection import (
    input_size,
    is_projection,
    output_size,
)
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensor_parallel.plan.heads import (
    count_heads,
    indivisible_heads,
    norms_before,
    uncounted,
)
from lightning_dist.engine.tensors.module_tree import dotted

_SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("wq", "wk", "wv"),
    ("w_q", "w_k", "w_v"),
    ("W_q", "W_k", "W_v"),
    ("W_query", "W_key", "W_value"),
    ("Wq", "Wk", "Wv"),
    ("queries", "keys", "values"),
    ("to_q", "to_k", "to_v"),
    ("q_linear", "k_linear", "v_linear"),
    ("query_proj", "key_proj", "value_proj"),
)
_FUSED = (
    "qkv",
    "qkv_proj",
    "query_key_value",
    "c_attn",
    "in_proj",
    "to_qkv",
    "Wqkv",
    "wqkv",
    "w_qkv",
)
_OUTPUTS = (
    "o_proj",
    "out_proj",
    "output_proj",
    "out",
    "o",
    "wo",
    "w_o",
    "Wo",
    "W_o",
    "dense",
    "proj",
    "c_proj",
    "out_lin",
    "out_linear",
    "to_out",
)
_PASSED_BIASES = ("alibi", "position_bias", "relative_position_bias", "rel_pos_bias")
# Their fused weights are laid out in a way of their own, under a usual name.
_ODD_LAYOUTS = ("CodeGenAttention", "GPTBigCodeAttention")
_ROTARY = ("freq", "cos", "sin")


def is_attention_projection(own_name: str) -> bool:
    """Returns whether a layer's own name is that of a query, key or value projection."""
    return own_name in _FUSED or any(own_name in names for names in _SEPARATE)


def find_attention(root: nn.Module, name: str) -> tuple[dict[str, Style], dict[str, str]]:
    """Returns the styles of an attention's projections, or else why not, by layer name.

    Both are empty for no attention.
    """
    attention = root.get_submodule(name)
    own_names = _inputs(attention)
    if not own_names:
        return {}, {}
    inputs = [dotted(name, own_name) for own_name in own_names]
    features = _features(attention, own_names)
    output = _output(root, name, features)
    if output is None or not _sizes_agree(attention, own_names, features):
        sizes = " and ".join(str(output_size(root.get_submodule(i))) for i in inputs)
        output = _output(root, name, None)
        taken = "none" if output is None else input_size(root.get_submodule(output))
        reason = (
            f"its {' and '.join(own_names)} give {sizes} features, and its output projection takes"
            f" {taken}; queries, keys and values in one layer must be of one size"
        )
    else:
        norms = _head_norms(attention, features)
        parts = {root.get_submodule(layer) for layer in (*inputs, output)}
        known = parts.union(norms.values(), norms_before(attention))
        reason = _reason_to_replicate(attention, features, known) or ""
        if not reason:
            styles = dict.fromkeys(inputs, Style.COLWISE) | {output: Style.ROWWISE}
            return styles | {dotted(name, norm): Style.LOCAL for norm in norms}, {}
    return {}, dict.fromkeys([*inputs, *filter(None, [output])], reason)


def _reason_to_replicate(
    attention: nn.Module, features: int, sharded_parts: Collection[nn.Module]
) -> str | None:
    """Returns the reason why an attention may compute something else with some of its heads."""
    if count_heads(attention, features) is None:
        return uncounted(attention, features)
    if indivisible := indivisible_heads(attention):
        return indivisible
    kind = type(attention).__name__
    if kind in _ODD_LAYOUTS:
        return f"a {kind} lays queries, keys and values out in a way of its own"
    own = {tensor for part in sharded_parts for tensor in part.parameters()}
    foreign = [name for name, p in attention.named_parameters() if p not in own]
    if foreign:
        return f"its {foreign[0]} is no projection's, and may be of some heads, or of all features"
    passed = set(_PASSED_BIASES) & set(inspect.signature(attention.forward).parameters)
    if getattr(getattr(attention, "config", None), "alibi", bool(passed)):
        return f"it is given a bias for each head ({', '.join(sorted(passed)) or 'alibi'})"
    odd = list(_odd_buffers(attention))
    return f"its buffer {odd[0]} may be of some heads" if odd else None


def _head_norms(attention: nn.Module, features: int) -> dict[str, nn.Module]:
    """Returns the norms of single heads."""
    heads = count_heads(attention, features)
    return {
        name: part
        for name, part in attention.named_modules()
        if heads is not None
        and "norm" in type(part).__name__.lower()
        and [p.numel() for p in part.parameters()][:1] == [features // heads]
        and all(p.shape == (features // heads,) for p in part.parameters())
    }


def _inputs(attention: nn.Module) -> tuple[str, ...]:
    children = dict(attention.named_children())
    for names in (*_SEPARATE, *((fused,) for fused in _FUSED)):
        if all(name in children and is_projection(children[name]) for name in names):
            return names
    return ()


def _features(attention: nn.Module, inputs: tuple[str, ...]) -> int:
    return output_size(attention.get_submodule(inputs[0])) // (3 if len(inputs) == 1 else 1)


def _output(root: nn.Module, name: str, features: int | None) -> str | None:
    parent = name.rpartition(".")[0]
    # BERT has its output projection in a sibling: attention.self, attention.output.dense.
    for holder in (name, dotted(parent, "output")) if name else (name,):
        for own_name in _OUTPUTS:
            for candidate in (dotted(holder, own_name), dotted(holder, f"{own_name}.0")):
                part = _get(root, candidate)
                if part is None or not is_projection(part):
                    continue
                if features is None or input_size(part) == features:
                    return candidate
    return None


def _sizes_agree(attention: nn.Module, inputs: tuple[str, ...], features: int) -> bool:
    sizes = [output_size(attention.get_submodule(name)) for name in inputs]
    if len(sizes) == 1:
        return sizes == [3 * features]
    return sizes[1] == sizes[2] and features % sizes[1] == 0


def _odd_buffers(attention: nn.Module) -> Iterator[str]:
    """Lists what is neither a causal mask nor a rotary frequency: it may be of some heads."""
    for name, buffer in attention.named_buffers():
        own_name = name.rpartition(".")[2]
        if not (_is_mask(buffer) or any(word in own_name for word in _ROTARY)):
            yield name


def _is_mask(buffer: Tensor) -> bool:
    if buffer.dim() < 2:
        return buffer.numel() == 1
    *others, rows, columns = buffer.shape
    return rows == columns and all(size == 1 for size in others)


def _get(root: nn.Module, name: str) -> nn.Module | None:
    try:
        return root.get_submodule(name)
    except AttributeError:
        return None
