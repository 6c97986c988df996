"""Finds a tensor-parallel plan from the model.

The plan of the user's module comes first, then the names and sizes that are usual for transformers.
A layer is replicated if it is not surely one of these, or if its shards do not add up to the whole
(:mod:`.plan.verify`). A module that cannot be run on its own is cut by names and sizes. The first
step checks it with its own arguments (:mod:`.plan.first_calls`), or warns that it is not proven.
The first step also checks the borders of all regions (:mod:`.layers.graph_check`).

A Hugging Face model's built-in plan is written for inference, and is not read: of 39 architectures
of transformers none names a layer that is not found here, and six name fewer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from lightning_dist.engine.common.names import shorten
from lightning_dist.engine.tensor_parallel.config import resolve_plan
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensor_parallel.plan.attention import find_attention
from lightning_dist.engine.tensor_parallel.plan.mlp import find_mlp
from lightning_dist.engine.tensor_parallel.plan.verify import check_parts, find_mismatches
from lightning_dist.engine.tensor_parallel.plan.vocabulary import (
    find_vocabulary,
    refused_vocabulary,
)
from lightning_dist.engine.tensors.module_tree import original_class


@dataclass(frozen=True)
class FoundPlan:
    """The plan of a model, in its order, and the reasons why some layers are replicated."""

    styles: Mapping[str, Style]
    reasons: Mapping[str, str]  # for layers that could be sharded by their names


def find_plan(module: nn.Module, tp_size: int = 1) -> FoundPlan:
    """Returns the plan of a model.

    Args:
        module: The model; its method ``tensor_parallel_plan()``, if it has one, returns the plan.
        tp_size: Number of ranks. If it does not divide the vocabulary, that is replicated; other
            sizes are not checked here.

    Raises:
        ValueError: No layer was found, or the module's own plan is wrong.
    """
    own_plan = getattr(module, "tensor_parallel_plan", None)
    if callable(own_plan):
        styles = resolve_plan(module, own_plan())
        check_parts(module, styles, tp_size)
        names = [name for name, _ in module.named_modules() if name not in styles]
        return FoundPlan(styles, dict.fromkeys(names, "tensor_parallel_plan() does not name it"))
    found: dict[str, Style] = {}
    refused: dict[str, str] = {}
    for name, _ in module.named_modules():
        for layers, whys in (find_attention(module, name), find_mlp(module, name)):
            found |= layers
            refused |= whys
    pairs, reasons = _without_mismatches(module, found, tp_size)
    styles = pairs | find_vocabulary(module, pairs, tp_size)
    reasons |= refused_vocabulary(module, styles, tp_size) | refused
    if not styles:
        first = [f" {name!r} is replicated: {reason}." for name, reason in reasons.items()][:1]
        classes = dict.fromkeys(original_class(part).__name__ for part in module.modules())
        raise ValueError(
            "Pass plan={...}, style by pattern of module names, like {'*.up': 'colwise', '*.down':"
            " 'rowwise'}, or write a method tensor_parallel_plan() that returns one, or use"
            " FSDPStrategy(), which takes any module. No"
            f" tensor-parallel plan was found for {type(module).__name__}: no attention with query,"
            " key, value and output projections, no MLP of two projections, and no token embedding"
            " with a head, by their usual names and sizes. There are:"
            f" {shorten(list(classes))}.{''.join(first)}"
        )
    ordered = {name: styles[name] for name, _ in module.named_modules() if name in styles}
    return FoundPlan(ordered, reasons)


def _without_mismatches(
    module: nn.Module, pairs: dict[str, Style], tp_size: int
) -> tuple[dict[str, Style], dict[str, str]]:
    """Returns the styles without layers that fail the verification, and the mismatches by layer."""
    styles = {name: pairs[name] for name, _ in module.named_modules() if name in pairs}
    mismatches = find_mismatches(module, styles, tp_size)
    wrong = {n: mismatch for found, mismatch in mismatches for n in (*found.region, *found.local)}
    return {name: style for name, style in styles.items() if name not in wrong}, wrong
