"""Hooks that users register on layers; each is linear, so that parts of a batch may be scaled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

FACTOR = 0.75


def _scaled(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {**tree, "x": _scaled(tree["x"])}
    if isinstance(tree, tuple):
        return tuple(map(_scaled, tree))
    return tree * FACTOR if isinstance(tree, Tensor) and tree.is_floating_point() else tree


def _on_input(model: nn.Module) -> None:
    model[1].register_forward_pre_hook(lambda _, given: _scaled(given))  # type: ignore[index]


def _on_output(model: nn.Module) -> None:
    model[4].register_forward_hook(lambda _, given, output: _scaled(output))  # type: ignore[index]


def _on_named(model: nn.Module) -> None:
    model[3].register_forward_pre_hook(  # type: ignore[index]
        lambda _, given, named: (_scaled(given), named), with_kwargs=True
    )


def _on_gradient(model: nn.Module) -> None:
    model[2].register_full_backward_hook(lambda _, into, out: _scaled(into))  # type: ignore[index]


def _on_output_gradient(model: nn.Module) -> None:
    model[2].register_full_backward_pre_hook(lambda _, out: _scaled(out))  # type: ignore[index]


def _inside(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda _, given, output: _scaled(output))
            layer.register_full_backward_hook(lambda _, into, out: _scaled(into))


def _on_model(model: nn.Module) -> None:
    model.register_forward_hook(lambda _, given, output: _scaled(output))


LAYER_HOOKS: dict[str, Callable[[nn.Module], None]] = {
    "input": _on_input,
    "output": _on_output,
    "named": _on_named,
    "gradient": _on_gradient,
    "output_gradient": _on_output_gradient,
    "inside": _inside,
    "model": _on_model,
}
