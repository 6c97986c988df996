"""Verifies that shards add up to the whole, before a layer is sharded.

Whether layers can be sharded depends on the code between them, which may lay out its heads in
another way, or use all features at once. So a copy of the module around the layers is run, whole
and in parts (:mod:`.plan.proof`), in training mode and in evaluation mode. A module whose arguments
cannot be guessed (:mod:`.plan.trial_run`), or a large whole model, is not verified here, but at its
first call (:mod:`.plan.first_calls`). An attention in such a module that computes with the width of
all heads is a mismatch, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.engine.common.names import shorten
from lightning_dist.engine.tensor_parallel.layers.projection import (
    has_own_forward,
    input_size,
    is_projection,
)
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensor_parallel.plan.attention import is_attention_projection
from lightning_dist.engine.tensor_parallel.plan.heads import check_heads, needs_proof
from lightning_dist.engine.tensor_parallel.plan.proof import (
    LayerComparison,
    Sharding,
    prove_in_both_modes,
)
from lightning_dist.engine.tensor_parallel.plan.regions import (
    Partners,
    Styles,
    head_widths,
    holders,
    paths,
)
from lightning_dist.engine.tensor_parallel.plan.trial_run import Trial, guess_trials, kind_of
from lightning_dist.engine.tensors.module_tree import dotted, original_class

_BATCH, _LENGTH = 2, 4
_LARGEST_MODEL = 2**25  # parameters of a whole model to copy; parts of a model are always copied


def find_mismatches(
    module: nn.Module, styles: Styles, tp_size: int
) -> Iterator[tuple[Sharding, str]]:
    """Lists the modules that compute another result if sharded, and their mismatches."""
    known: dict[Any, str | None] = {}
    for sharding in shardings(module, styles, tp_size):
        holder = module.get_submodule(sharding.name)
        kind = (*kind_of(holder), *sharding.styles)
        if kind not in known:
            known[kind] = _find_mismatch(holder, sharding)
        mismatch = known[kind]
        if mismatch is not None:
            yield sharding, mismatch


def shardings(module: nn.Module, styles: Styles, tp_size: int) -> Iterator[Sharding]:
    """Lists the modules around whole regions, and how their layers are cut."""
    all_holders, partners = holders(module, styles), Partners(styles)
    met = {layer for layers in all_holders.values() for layer in layers}
    alone = {n: style for n, style in styles.items() if style.sums_up and n not in met}
    all_local = local_in(styles, all_holders)
    for name, layers in all_holders.items():
        stacks = {_inside(name, n): partners.stacked_in(module, n) for n in layers}
        inner = {_inside(name, n): styles[n] for n in layers}
        local = all_local.get(name, [])
        inner |= {_inside(name, n): Style.LOCAL for n in local}
        prefix = f"{name}." if name else ""
        inner |= {_inside(name, n): s for n, s in alone.items() if n.startswith(prefix)}
        label = repr(name or original_class(module).__name__)
        yield Sharding(label, name, inner, stacks, tp_size, layers, local)


def is_too_large(module: nn.Module, sharding: Sharding) -> bool:
    """Returns whether a module is a whole model that is too large to copy."""
    size = sum(p.numel() for p in module.parameters()) if not sharding.name else 0
    return size > _LARGEST_MODEL


def _find_mismatch(holder: nn.Module, sharding: Sharding) -> str | None:
    for layer in sharding.styles:
        if has_own_forward(holder.get_submodule(layer)):
            return f"{layer!r} of {sharding.label} has a forward of its own, which would be lost"
    if is_too_large(holder, sharding):
        return _unproven(holder, sharding)

    def trials_of(copy: nn.Module, dtype: torch.dtype) -> Iterator[Trial]:
        activations = _activations(copy, sharding.styles, dtype)
        return guess_trials(copy, sharding.styles, activations, _LENGTH)

    finding = prove_in_both_modes(holder, trials_of, partial(LayerComparison, sharding))
    return finding.mismatch if finding.is_proven else _unproven(holder, sharding)


def check_parts(module: nn.Module, styles: Styles, tp_size: int) -> None:
    """Checks that sharded layers compute the whole result, as far as a copy can be run."""
    _check_ends(styles)
    _check_local(module, styles)
    for sharding, mismatch in find_mismatches(module, styles, tp_size):
        raise ValueError(
            f"{advice(sharding, mismatch)} (A copy of it with random weights was run whole and as"
            f" tp_size={tp_size} parts.)"
        )


def advice(sharding: Sharding, mismatch: str) -> str:
    """Returns what to do about a mismatch, in words."""
    each = "hidden feature is computed by itself"
    if any(map(is_attention_projection, (layer.rpartition(".")[2] for layer in sharding.region))):
        each = (
            "head is computed by itself (of a fused layer: all queries, then all keys, then all"
            " values)"
        )
    named = shorten([repr(layer) for layer in sharding.region], 4)
    return f"Leave {named} out of plan=, or write {sharding.label} so that each {each}: {mismatch}."


def local_in(styles: Styles, all_holders: Collection[str]) -> dict[str, list[str]]:
    """Returns the local layers by their smallest holder."""
    found: dict[str, list[str]] = {}
    for name, style in styles.items():
        around = (path for path in paths(name) if path != name and path in all_holders)
        holder = next(around, None) if style is Style.LOCAL else None
        if holder is not None:
            found.setdefault(holder, []).append(name)
    return found


def _check_ends(styles: Styles) -> None:
    """Checks that regions begin and end."""
    begins = [name for name, style in styles.items() if style is Style.COLWISE]
    ends = [name for name, style in styles.items() if style.sums_up]
    if begins and not ends:
        raise ValueError(
            "Name the layer that takes what it gives 'rowwise' in plan=, or use 'colwise_gather':"
            f" the plan gives each rank its own features in {begins[0]!r} ('colwise'), and no layer"
            " sums up over them."
        )
    partners = Partners(styles)
    met = {partners.of(name) for name in begins}
    parents = {name.rpartition(".")[0] for name in begins}
    for name in ends:
        if name not in met and name.rpartition(".")[0] not in parents:
            raise ValueError(
                f"Name the layer that gives {name!r} its features 'colwise' in plan=, or leave it"
                f" out: the plan sums up over the ranks' own features in {name!r}, as a"
                f" {styles[name].value!r} layer does, and no layer beside it gives them any."
            )


def _check_local(module: nn.Module, styles: Styles) -> None:
    inside = {n for names in local_in(styles, holders(module, styles)).values() for n in names}
    for name, style in styles.items():
        if style is Style.LOCAL and name not in inside:
            raise ValueError(
                f"Leave {name!r} out of plan=: it is 'local' there, but nothing is cut in the"
                " module that has it: no 'colwise' and 'rowwise' layers are beside it."
            )


def _unproven(holder: nn.Module, sharding: Sharding) -> str | None:
    """Returns the mismatch of a module that could not be run; None if there is none."""
    for parent, width in head_widths(holder, sharding.styles).items():
        attention = holder.get_submodule(parent)
        if needs_proof(attention, width):
            path = dotted(sharding.name, parent)
            try:
                check_heads(path, attention, sharding.tp_size)
            except ValueError as error:
                return str(error)
            return (
                f"{path!r} computes with the width of all heads, and could not be run on its own to"
                " see what it does with that of some"
            )
    return None


def _activations(module: nn.Module, styles: Styles, dtype: torch.dtype) -> list[Tensor]:
    """Creates sequences and batches of vectors, the likeliest first; each as wide as some layer."""
    first = next(name for name, style in styles.items() if style.takes_whole_input)
    layers = [module.get_submodule(first), *filter(is_projection, module.modules())]
    widths = dict.fromkeys(map(input_size, layers))
    sequences = [torch.randn(_BATCH, _LENGTH, width, dtype=dtype) for width in widths]
    vectors = [x.flatten(0, 1) for x in sequences]
    normalises = any(isinstance(part, nn.BatchNorm1d) for part in module.modules())
    return [*vectors, *sequences] if normalises else [*sequences, *vectors]


def _inside(holder: str, name: str) -> str:
    return name.removeprefix(f"{holder}.") if holder else name
