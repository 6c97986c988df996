"""The parts of a model that a plan replicates on each rank, with their sizes and the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from lightning_dist.engine.common.names import with_stars
from lightning_dist.engine.tensor_parallel.layers.projection import is_projection
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensors.module_tree import original_class

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class WholePart:
    """Modules that are left whole for one reason.

    Attributes:
        patterns: Patterns of the modules' names.
        share: The modules' share of all parameters of the model.
        reason: The reason in words.
    """

    patterns: tuple[str, ...]
    share: float
    reason: str


def left_whole(
    module: nn.Module, styles: Mapping[str, Style], reasons: Mapping[str, str]
) -> list[WholePart]:
    """Lists the parts that a plan leaves whole, in the order of the model.

    Args:
        module: The whole model.
        styles: Styles by module name, of the modules that are in the plan.
        reasons: Reasons by module name, for some of the modules.
    """
    spread = {p for name in styles for p in module.get_submodule(name).parameters(recurse=False)}
    sizes: dict[tuple[str, str], int] = {}  # by pattern and reason
    counted = set(spread)
    for name, part in module.named_modules():
        own = set(part.parameters(recurse=False)) - counted
        if name in styles or not own:
            continue
        key = with_stars(name) or "itself", reasons.get(name) or _reason(module, name)
        sizes[key] = sizes.get(key, 0) + sum(parameter.numel() for parameter in own)
        counted |= own
    total = sum(parameter.numel() for parameter in module.parameters())
    found: dict[str, list[str]] = {}
    for pattern, reason in sizes:
        found.setdefault(reason, []).append(pattern)
    return [
        WholePart(tuple(patterns), sum(sizes[p, reason] for p in patterns) / total, reason)
        for reason, patterns in found.items()
    ]


def _reason(module: nn.Module, name: str) -> str:
    """Returns the reason that follows from the kind of a module."""
    part = module.get_submodule(name)
    kind = original_class(part).__name__
    around = module.get_submodule(name.rpartition(".")[0])
    if isinstance(part, nn.MultiheadAttention) or isinstance(around, nn.MultiheadAttention):
        return (
            "nn.MultiheadAttention uses its weights itself; write nn.Linear projections around"
            " F.scaled_dot_product_attention"
        )
    if isinstance(part, nn.RNNBase | nn.RNNCellBase):
        return f"an {kind} needs all features of its state at each step"
    if isinstance(part, _CONVOLUTIONS):
        return "convolutions are not spread"
    if isinstance(part, nn.Embedding):
        return "only the embedding of a vocabulary is spread"
    if is_projection(part):
        return (
            "no other layer by whose name and size it belongs to an attention, an MLP or a"
            " vocabulary; name it and its partner in plan={...}"
        )
    if any(parameter.dim() > 1 for parameter in part.parameters(recurse=False)):
        return f"a {kind} is not spread"
    return f"a {kind} works on what all ranks have"
