"""Say in a few lines what a tensor-parallel plan spreads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from lightning_dist.name_pattern import with_stars
from lightning_dist.suggestion import shorten
from lightning_dist.tensor.styles import Style

_KINDS = {Style.VOCAB: "embedding", Style.COLWISE_GATHER: "head", Style.REPLICATE: "whole"}


def describe_plan(module: nn.Module, styles: Mapping[str, Style]) -> str:
    """Describes a plan, the likes of a layer once.

    Args:
        module: The model.
        styles: By module name, in the order of the model.

    Returns:
        A line for each kind of layer, and one for those with a matrix that are left whole.
    """
    entries: dict[str, list[str]] = {}
    for name, style in styles.items():
        is_attention = "att" in name.lower()
        kind = _KINDS.get(style, "attention" if is_attention else "mlp")
        entries.setdefault(kind, []).append(f"{with_stars(name)} ({style.value})")
    left_out = [with_stars(name) for name in _left_out(module, styles)]
    entries |= {"left out": left_out} if left_out else {}
    return "\n".join(
        f"{kind}: {shorten(list(dict.fromkeys(names)))}" for kind, names in entries.items()
    )


def _left_out(module: nn.Module, styles: Mapping[str, Style]) -> Iterator[str]:
    for name, part in module.named_modules():
        has_matrix = any(p.dim() > 1 for p in part.parameters(recurse=False))
        if has_matrix and name not in styles:
            yield name
