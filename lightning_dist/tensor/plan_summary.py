"""Say in a few lines what a tensor-parallel plan spreads, and why it leaves the rest whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_dist.name_pattern import with_stars
from lightning_dist.suggestion import shorten
from lightning_dist.tensor.left_whole import left_whole
from lightning_dist.tensor.styles import Style

_KINDS = {Style.VOCAB: "embedding", Style.COLWISE_GATHER: "head", Style.REPLICATE: "whole"}
_SMALL = 0.01
"""A share of the parameters; for less no reason is given."""


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A plan in a few lines.

    Attributes:
        spread: For each kind of layer, the layers and their styles.
        whole: For each reason why parts are left whole, the parts and their size.
    """

    spread: tuple[str, ...]
    whole: tuple[str, ...]

    def __str__(self) -> str:
        """Joins the lines."""
        return "\n".join([*self.spread, *self.whole])


def describe_plan(
    module: nn.Module, styles: Mapping[str, Style], reasons: Mapping[str, str]
) -> PlanSummary:
    """Describes a plan, the likes of a layer once.

    Args:
        module: The model, whole.
        styles: By module name, in the order of the model.
        reasons: Why a module is left whole, by the name of some.
    """
    entries: dict[str, list[str]] = {}
    for name, style in styles.items():
        is_attention = "att" in name.lower()
        kind = _KINDS.get(style, "attention" if is_attention else "mlp")
        entries.setdefault(kind, []).append(f"{with_stars(name)} ({style.value})")
    parts = left_whole(module, styles, reasons)
    lines = [
        f"left whole: {_list(part.patterns)} ({part.share:.0%} of the parameters): {part.reason}"
        for part in parts
        if part.share >= _SMALL
    ]
    small = [pattern for part in parts if part.share < _SMALL for pattern in part.patterns]
    if small:
        lines.append(f"left whole, less than {_SMALL:.0%} for each reason: {_list(small)}")
    spread = [f"{kind}: {_list(names)}" for kind, names in entries.items()]
    return PlanSummary(tuple(spread), tuple(lines))


def _list(names: Sequence[str]) -> str:
    return shorten(list(dict.fromkeys(names)))
