"""Say in a few lines what a tensor-parallel plan spreads, and why it leaves the rest whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from lightning_dist.name_pattern import with_stars
from lightning_dist.suggestion import shorten
from lightning_dist.tensor.left_whole import left_whole
from lightning_dist.tensor.styles import Style

_KINDS = {Style.VOCAB: "embedding", Style.COLWISE_GATHER: "head", Style.REPLICATE: "whole"}
_SMALL = 0.01
"""A share of the parameters; for less no reason is given."""


def describe_plan(
    module: nn.Module, styles: Mapping[str, Style], reasons: Mapping[str, str]
) -> str:
    """Describes a plan, the likes of a layer once.

    Args:
        module: The model, whole.
        styles: By module name, in the order of the model.
        reasons: Why a module is left whole, by the name of some.

    Returns:
        A line for each kind of layer, and one for each reason why parts are left whole.
    """
    entries: dict[str, list[str]] = {}
    for name, style in styles.items():
        is_attention = "att" in name.lower()
        kind = _KINDS.get(style, "attention" if is_attention else "mlp")
        entries.setdefault(kind, []).append(f"{with_stars(name)} ({style.value})")
    lines = [f"{kind}: {_list(names)}" for kind, names in entries.items()]
    parts = left_whole(module, styles, reasons)
    lines += [
        f"left whole: {_list(part.patterns)} ({part.share:.0%} of the parameters): {part.reason}"
        for part in parts
        if part.share >= _SMALL
    ]
    small = [pattern for part in parts if part.share < _SMALL for pattern in part.patterns]
    if small:
        lines.append(f"left whole, less than {_SMALL:.0%} for each reason: {_list(small)}")
    return "\n".join(lines)


def _list(names: Sequence[str]) -> str:
    return shorten(list(dict.fromkeys(names)))
