"""Say in a few lines what a tensor-parallel plan spreads, and why it leaves the rest whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_dist.engine.common.name_pattern import with_stars
from lightning_dist.engine.common.suggestion import shorten
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensor_parallel.left_whole import WholePart, left_whole

_KINDS = {Style.VOCAB: "embedding", Style.COLWISE_GATHER: "head", Style.REPLICATE: "whole"}
_SMALL = 0.01
"""A share of the parameters; for less no reason is given."""
_WORTH_A_LINE = 0.05
"""A share of the parameters; a run that leaves less of them whole begins without a word of it."""
_MOST_NAMES = 3


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A plan in a few lines.

    Attributes:
        spread: For each kind of layer, the layers and their styles.
        whole: For each reason why parts are left whole, the parts and their size.
        largest: The largest of these in one line, empty if they are small.
    """

    spread: tuple[str, ...]
    whole: tuple[str, ...]
    largest: str

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
        f"left whole: {_list(part.patterns)}{_tell(part)}" for part in parts if part.share >= _SMALL
    ]
    small = [pattern for part in parts if part.share < _SMALL for pattern in part.patterns]
    if small:
        lines.append(f"left whole, less than {_SMALL:.0%} for each reason: {_list(small)}")
    spread = [f"{kind}: {_list(names)}" for kind, names in entries.items()]
    return PlanSummary(tuple(spread), tuple(lines), _describe_largest(parts))


def _describe_largest(parts: Sequence[WholePart]) -> str:
    total = sum(part.share for part in parts)
    if total < _WORTH_A_LINE:
        return ""
    largest = max(parts, key=lambda part: part.share)
    rest = total - largest.share
    more = f"; {rest:.0%} more: trainer.strategy.describe()" if rest >= _SMALL else ""
    return f"left whole: {shorten(largest.patterns, _MOST_NAMES)}{_tell(largest)}{more}"


def _tell(part: WholePart) -> str:
    return f" ({part.share:.0%} of the parameters): {part.reason}"


def _list(names: Sequence[str]) -> str:
    return shorten(list(dict.fromkeys(names)))
