"""Half precision built into a graph.

A graph runs a module's operations and does not call its submodules, so a submodule's hook cannot
cast an input. So the casts are traced with the other operations: the traced structure has
half-precision weights, and the hooks that cast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from lightning_dist.engine.precision.casts import HalfCasts, half_copies, swapped_parameters
from lightning_dist.engine.precision.policy import HalfPrecision
from lightning_dist.engine.tensors.patch import hooks_of


@dataclass(frozen=True, slots=True)
class TracedCasts:
    """Makes a structure compute in the precision that a part of the user's module has in a step.

    Attributes:
        half: Chooses the modules that compute in half precision.
        path: Dotted name of the part in the user's module; empty for the whole module.
    """

    half: HalfPrecision
    path: str

    def __call__(self, structure: nn.Module) -> None:
        """Casts the structure's weights and adds the hooks that cast inputs."""
        root = _placed(structure, self.path)
        for parameter in self.half.half_parameters(root).values():
            parameter.data = parameter.data.to(self.half.dtype)
        HalfCasts(root, self.half)
        for hooks in hooks_of(structure):  # the part's own hooks run around the graph
            hooks.clear()


@contextmanager
def as_in_step(module: nn.Module, half: HalfPrecision) -> Iterator[None]:
    """Returns a context manager in which a module computes in half precision, as in steps."""
    casts = HalfCasts(module, half)
    try:
        copies = half_copies(half.half_parameters(module).values(), half.dtype)
        with swapped_parameters(module, copies):
            yield
    finally:
        casts.remove()


def _placed(part: nn.Module, path: str) -> nn.Module:
    """Returns a module that has the part under its dotted name, for the rule reads names."""
    for name in reversed(path.split(".") if path else []):
        outer = nn.Module()
        outer.add_module(name, part)
        part = outer
    return part
