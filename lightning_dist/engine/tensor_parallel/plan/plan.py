"""A tensor-parallel plan: styles by patterns of layer names.

A plan is written with plain strings, so that it can stand in YAML: patterns of module names (see
:mod:`.common.names`) and the styles of :mod:`.layers.styles`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_dist.engine.common.names import fits, nearest, shorten, with_stars
from lightning_dist.engine.tensor_parallel.layers.projection import (
    has_own_forward,
    is_adapted,
    is_projection,
    is_token_table,
)
from lightning_dist.engine.tensor_parallel.layers.styles import Style


def resolve_plan(module: nn.Module, plan: Mapping[str, str]) -> dict[str, Style]:
    """Returns the modules that a plan names, with their styles.

    Args:
        module: The model.
        plan: Styles by pattern; if several patterns match a module, the last one counts.

    Returns:
        Styles by module name, in the order of the model.

    Raises:
        ValueError: A style is unknown or does not fit, or a pattern matches no module.
    """
    names = [name for name, _ in module.named_modules() if name]
    found: dict[str, Style] = {}
    for pattern, style_name in plan.items():
        style = parse_style(style_name, pattern)
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


def parse_style(name: str, pattern: str) -> Style:
    """Returns the style of a name in a plan.

    Raises:
        ValueError: There is no such style.
    """
    styles = {style.value: style for style in Style}
    if not isinstance(name, str) or name not in styles:
        raise ValueError(
            f"Use one of {', '.join(styles)} in plan=: the style {name!r} of {pattern!r} is"
            f" unknown.{nearest(str(name), styles)}"
        )
    return styles[name]


def _check_kind(name: str, layer: nn.Module, style: Style) -> None:
    if style is Style.VOCAB:
        is_right = is_token_table(layer)
        wanted = "an nn.Embedding without max_norm, scale_grad_by_freq and sparse"
    elif style.cuts_a_matrix:
        is_right, wanted = is_projection(layer), "a plain nn.Linear"
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
