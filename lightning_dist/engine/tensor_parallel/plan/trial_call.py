"""What a module may be called with, when it is run on its own.

An activation, mostly, and for a cross-attention a second one. Attentions also want to know how to
rotate queries and keys, as a complex number, as cosine and sine, in one argument or in two. What it
is can be guessed from the argument's name, and the guess that the module can compute with is right:
wrong sizes are an error. Masks are left out. What nobody can guess is nothing,
a number, or an activation.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.engine.tensor_parallel.layers.projection import input_size
from lightning_dist.engine.tensor_parallel.plan.heads import count_heads
from lightning_dist.engine.tensor_parallel.plan.regions import Styles, attentions
from lightning_dist.engine.tensors.tree import flatten, map_tensors

_SAME = ("key", "value", "k", "v", "memory")  # a second activation, as of a cross-attention
_ROTATIONS = ("cos", "sin", "freq", "rot", "rope", "angle", "position_emb", "pos_emb")


@dataclass(frozen=True)
class TrialCall:
    """A way to call a module.

    Attributes:
        activations: Names of the arguments that get the activation, but for the first.
        others: Arguments by name.
        is_guess: Whether the module may want something else.
    """

    activations: tuple[str, ...] = ()
    others: Mapping[str, Any] = field(default_factory=dict)
    is_guess: bool = False

    def run(self, module: nn.Module, x: Tensor) -> Tensor:
        """Calls a module's forward, without the hooks around it.

        Args:
            module: Any.
            x: The activation.

        Returns:
            The first tensor that the module has returned.
        """
        others = map_tensors(Tensor.clone, dict(self.others))
        returned = module.forward(x, **dict.fromkeys(self.activations, x), **others)
        found: Tensor = flatten(returned)[0][0]
        return found


def trial_calls(module: nn.Module, styles: Styles, length: int) -> Iterator[TrialCall]:
    """Gives ways to call a module, the likeliest first.

    Args:
        module: Any, whole.
        styles: Of the layers in it.
        length: Of the sequence.

    Yields:
        Calls, some of which it may refuse.
    """
    _, *parameters = inspect.signature(module.forward).parameters.values()
    wanted = [p for p in parameters if p.default is p.empty and _has_name(p)]
    activations = tuple(p.name for p in wanted if p.name in _SAME)
    unknown = [p for p in wanted if p.name not in _SAME]
    if not unknown:
        yield TrialCall(activations)
    asked = [p.name for p in parameters if _has_name(p) and p.default in (p.empty, None)]
    rotated = [name for name in asked if any(word in name.lower() for word in _ROTATIONS)]
    nothing = {p.name: 0 if p.annotation in (int, "int") else None for p in unknown}
    head_size = _head_size(module, styles)
    if not rotated or head_size is None:
        if unknown:
            yield TrialCall(activations, nothing, is_guess=True)
            yield TrialCall(activations, dict.fromkeys(nothing, 2.0), is_guess=True)
            yield TrialCall((*activations, *nothing), is_guess=True)
        return
    for guess in _rotations(length, head_size):
        given = nothing | {name: guess(name) for name in rotated}
        yield TrialCall(activations, given, is_guess=True)


def _head_size(module: nn.Module, styles: Styles) -> int | None:
    for parent in attentions(styles):
        sums = next(name for name, style in styles.items() if style.sums_up)
        features = input_size(module.get_submodule(sums))
        heads = count_heads(module.get_submodule(parent), features)
        if heads is not None:
            return features // heads
    return None


def _has_name(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def _rotations(length: int, head_size: int) -> Iterator[Any]:
    """Gives what makes a rotation for the argument of a name; some models rotate a part only."""
    for size in (head_size, head_size // 2, head_size // 4):
        half = torch.randn(length, size // 2)
        angles = torch.cat((half, half), -1)
        yield lambda _, angles=angles: (angles.cos()[None], angles.sin()[None])
        yield lambda _, half=half: torch.polar(torch.ones_like(half), half)
        yield lambda name, angles=angles: angles.sin() if "sin" in name else angles.cos()
