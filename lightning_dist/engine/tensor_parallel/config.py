"""The user's configuration of tensor parallelism, and the layers that a plan in it names.

A plan is written with plain strings, so that it can stand in YAML: patterns of module names (see
:mod:`.common.names`) and the styles of :mod:`.layers.styles`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from lightning_dist.engine.common.names import fits, nearest, shorten, with_stars
from lightning_dist.engine.tensor_parallel.layers.projection import (
    has_own_forward,
    is_adapted,
    is_projection,
    is_token_table,
)
from lightning_dist.engine.tensor_parallel.layers.styles import Style

_EXAMPLE = "plan={'*.q_proj': 'colwise', '*.o_proj': 'rowwise'}"


@dataclass(frozen=True)  # without slots, which the command line's parser does not take
class TensorConfig:
    """The arguments of :class:`~lightning_dist.TensorParallelStrategy` of the same names.

    Attributes:
        plan: Styles by pattern of module names, or ``"auto"``.
        sequence_parallel: Shard the sequence between the sharded layers.
        loss_parallel: Compute cross-entropy without gathering the logits.

    Raises:
        ValueError: The plan is of another kind, or a style in it is unknown.
    """

    plan: Literal["auto"] | Mapping[str, str] = "auto"
    sequence_parallel: bool = False
    loss_parallel: bool = False

    def __post_init__(self) -> None:
        """Checks the plan."""
        if self.plan == "auto":
            return
        is_plan = isinstance(self.plan, Mapping) and bool(self.plan)
        if not is_plan or not all(isinstance(pattern, str) for pattern in self.plan):
            raise ValueError(
                f"Pass plan='auto' or {_EXAMPLE}: plan={self.plan!r} must be 'auto' or a dictionary"
                " of patterns and styles."
            )
        for pattern, style in self.plan.items():
            _parse_style(style, pattern)


def resolve_plan(module: nn.Module, plan: Mapping[str, str]) -> dict[str, Style]:
    """Returns the modules that a plan names, in the order of the model, with their styles.

    If several patterns match a module, the last one counts.

    Raises:
        ValueError: A style is unknown or does not fit, or a pattern matches no module.
    """
    names = [name for name, _ in module.named_modules() if name]
    found: dict[str, Style] = {}
    for pattern, style_name in plan.items():
        style = _parse_style(style_name, pattern)
        fitting = [name for name in names if fits(name, pattern)]
        if not fitting:
            shown = list(dict.fromkeys(map(with_stars, names)))
            near = nearest(pattern, [*shown, *names])
            raise ValueError(
                f"Write the name of a module for {pattern!r} in plan=: it fits no module.{near}"
                f" There are: {shorten(shown)}."
            )
        found |= dict.fromkeys(fitting, style)
    for name, style in found.items():
        _check_kind(name, module.get_submodule(name), style)
    return {name: found[name] for name in names if name in found}


def _parse_style(name: str, pattern: str) -> Style:
    styles = {style.value: style for style in Style}
    if not isinstance(name, str):
        raise ValueError(
            f"Write the name of a style in plan=, one of {', '.join(styles)}, such as 'colwise' for"
            f" torch's ColwiseParallel(): {pattern!r} has a {type(name).__name__}."
        )
    if name not in styles:
        raise ValueError(
            f"Use one of {', '.join(styles)} in plan=: the style {name!r} of {pattern!r} is"
            f" unknown.{nearest(name, styles)}"
        )
    return styles[name]


def _check_kind(name: str, layer: nn.Module, style: Style) -> None:
    if style is Style.VOCAB:
        is_right = is_token_table(layer)
        wanted = "an nn.Embedding without max_norm, scale_grad_by_freq and sparse"
    elif style.cuts_a_matrix:
        is_right, wanted = is_projection(layer), "a plain nn.Linear with its weight as a parameter"
        if style is Style.COLWISE_GATHER and is_adapted(layer):
            is_right, wanted = False, "an nn.Linear without adapters, such as its base_layer"
    else:
        return
    if has_own_forward(layer):
        raise ValueError(
            f"Leave {name!r} out of plan=, or make its forward that of a class: as {style.value!r}"
            f" a {type(layer).__name__} that has a forward of its own would lose it."
        )
    if not is_right:
        raise ValueError(
            f"{_instead(name, layer)}: the style {style.value!r} needs {wanted}, but it is a"
            f" {type(layer).__name__}."
        )


def _instead(name: str, layer: nn.Module) -> str:
    """Returns the advice for a layer that its style in a plan does not fit."""
    if is_token_table(layer):
        return f"Use 'vocab' for {name!r} in plan=, or leave it out"
    if is_projection(layer):
        return (
            f"Use 'colwise', 'rowwise' or 'colwise_gather' for {name!r} in plan=, or leave it out"
        )
    if any(True for _ in layer.children()):
        return f"Name the layers inside of {name!r} in plan=, or leave it out"
    return f"Leave {name!r} out of plan="
