"""Run a function while a stage's layers have the weights of another version.

Forwards and backwards need that. In a backward, layers that recompute their activations
(``torch.utils.checkpoint``) read their weights again, when the optimizer has written newer ones.
The gradients would then be those of the old version, but at activations of the new one.

The user's step sees the same weights. If it computes a value from a parameter itself, such as a
penalty, that value adds to the gradient of that version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn

from lightning_dist.engine.stashing.versions import WeightVersion

T = TypeVar("T")


class SwappedWeights(nn.Module):
    """Swaps the weights of layers for those of a version.

    Args:
        layers: Layers of a stage.
        root: A module that contains them; its other modules with the same parameters get the
            version's weights as well.
    """

    def __init__(self, layers: nn.Module, root: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = layers
        self._places = _places(layers)
        self._elsewhere = [] if root is None else _places_elsewhere(layers, root)

    def run(self, version: WeightVersion | None, function: Callable[[], T]) -> T:
        """Runs a function with the weights of a version in place of the layers' own.

        Args:
            version: The version; None, or one without aliases, leaves the layers' weights.
            function: Runs the layers, or a step that runs them.
        """
        if version is None or not version.aliases:
            return function()
        # Not by torch's `tie_weights`: if a module has two names, that takes the alias set under
        # the first name for the module's own weight, and leaves the alias there.
        lent = {
            f"layers.{place}": alias
            for name, alias in version.aliases.items()
            for place in self._places.get(name, [name])
        }
        with _lent_elsewhere(self._elsewhere, version.aliases):
            result: T = torch.func.functional_call(self, lent, (function,), tie_weights=False)
        return result

    def backward(
        self, version: WeightVersion | None, roots: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Runs autograd with the weights of a version in place of the layers' own.

        Args:
            version: The version, as for :meth:`run`.
            roots: Roots of the autograd graph.
            gradients: One gradient for each root.
        """
        self.run(version, lambda: torch.autograd.backward(roots, gradients))

    def forward(self, function: Callable[[], T]) -> T:
        """Runs a function."""
        return function()


def _places(layers: nn.Module) -> dict[str, list[str]]:
    """Returns the paths of each parameter and buffer, one for each module that has it.

    Args:
        layers: Any module.

    Returns:
        All paths of a tensor, by its first path.
    """
    known: dict[int, list[str]] = {}
    for path, part in layers.named_modules():
        own = {"prefix": path, "recurse": False, "remove_duplicate": False}
        for place, tensor in chain(part.named_parameters(**own), part.named_buffers(**own)):
            known.setdefault(id(tensor), []).append(place)
    return {places[0]: places for places in known.values()}


Place = tuple[dict[str, nn.Parameter | None], str, str]
"""A module's parameters, the name of one in that module, and its name in the stage."""


def _places_elsewhere(layers: nn.Module, root: nn.Module) -> list[Place]:
    """Returns the places where other modules have a parameter of the layers."""
    names = {id(parameter): name for name, parameter in layers.named_parameters()}
    own = {id(part._parameters) for part in layers.modules()}
    return [
        (part._parameters, place, names[id(parameter)])
        for part in root.modules()
        if id(part._parameters) not in own
        for place, parameter in part._parameters.items()
        if id(parameter) in names
    ]


@contextmanager
def _lent_elsewhere(places: Sequence[Place], aliases: Mapping[str, Tensor]) -> Iterator[None]:
    lent = [(own, place, own[place], aliases[n]) for own, place, n in places if n in aliases]
    for own, place, _, alias in lent:
        own[place] = alias  # type: ignore[assignment]
    try:
        yield
    finally:
        for own, place, parameter, _ in lent:
            own[place] = parameter
