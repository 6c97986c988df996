"""Half precision built into a graph.

Where a module's operations are run and its parts are not called, no hook of a part can cast what it
is called with. So the casts are traced with the rest: the structure that is traced has its weights
in half precision, and the hooks that would cast.
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
    """Makes a structure compute as a part of the user's module does in a step.

    Attributes:
        half: What computes in half precision.
        path: Dotted name of the part in the user's module; empty for the whole.
    """

    half: HalfPrecision
    path: str

    def __call__(self, structure: nn.Module) -> None:
        """Dresses.

        Args:
            structure: Of the part; changed.
        """
        root = _placed(structure, self.path)
        for parameter in self.half.half_parameters(root).values():
            parameter.data = parameter.data.to(self.half.dtype)
        HalfCasts(root, self.half)
        for hooks in hooks_of(structure):  # those of the part itself run around the graph
            hooks.clear()


@contextmanager
def as_in_step(module: nn.Module, half: HalfPrecision) -> Iterator[None]:
    """Lets a module compute in half precision for a while, as it will in steps.

    Args:
        module: The user's.
        half: What computes so.

    Yields:
        Nothing.
    """
    casts = HalfCasts(module, half)
    try:
        with swapped_parameters(
            module, half_copies(half.half_parameters(module).values(), half.dtype)
        ):
            yield
    finally:
        casts.remove()


def _placed(part: nn.Module, path: str) -> nn.Module:
    """Gives a module that has the part in its place, for names count."""
    for name in reversed(path.split(".") if path else []):
        outer = nn.Module()
        outer.add_module(name, part)
        part = outer
    return part
