"""Random numbers that are the same on all ranks outside of a region, and differ inside.

Dropout on a replicated activation must drop the same elements on all ranks; on shards, other ones.
So a region's own numbers are seeded by the rank and by one number that is drawn outside. After the
region the state is that after this draw, so that activation checkpointing draws the same numbers
again. A region that draws nothing leaves the state as it was, as on one device. A recomputation may
stop inside of a region, and restores the generators' state. So the generators' seed decides whether
a rank is inside.
"""

from __future__ import annotations

from ctypes import string_at

import torch

from lightning_dist.engine.tensors.rng import generators_of, seed_of


class RegionRandomness:
    """Switches torch's generators at the borders of regions; regions do not nest.

    Args:
        index: This rank's place among the tensor-parallel ranks.
        device: The device whose generator is switched beside the CPU's.
    """

    def __init__(self, index: int, device: torch.device) -> None:
        self._index, self._device = index, device
        self._before: list[torch.Tensor] = []
        self._outside: list[torch.Tensor] = []
        self._inside: list[torch.Tensor] = []
        self._seed = 0

    def enter(self) -> None:
        """Switches to this rank's own numbers; does nothing inside of a region."""
        if self._is_inside():
            return
        generators = generators_of(self._device)
        self._before = _states(generators)
        self._seed = seed_of((int(torch.randint(2**62, ())), self._index))
        self._outside = _states(generators)
        for generator in generators:
            generator.manual_seed(self._seed)
        self._inside = _states(generators)

    def leave(self) -> None:
        """Switches to the numbers that all ranks share; does nothing outside of a region."""
        is_inside, states, self._outside = self._is_inside(), self._outside, []
        if is_inside:
            generators = generators_of(self._device)
            if _bytes_of(_states(generators)) == _bytes_of(self._inside):
                states = self._before
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

    def _is_inside(self) -> bool:
        return bool(self._outside) and torch.default_generator.initial_seed() == self._seed % 2**64


def _states(generators: list[torch.Generator]) -> list[torch.Tensor]:
    return [generator.get_state() for generator in generators]


def _bytes_of(states: list[torch.Tensor]) -> list[bytes]:
    """Reads states in host memory without torch: a dry run's fake mode has no values."""
    return [string_at(state.data_ptr(), state.nbytes) for state in states]
