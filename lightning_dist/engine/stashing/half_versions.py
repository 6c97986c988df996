"""Versions of a stage's weights in half precision, whose masters nobody stashes.

With fp32 masters a version *is* the cast: the optimizer writes to the masters, which no micro-batch
computes with, so nothing has to be copied when it does. A version costs 2 bytes per parameter, and
is gone when the last micro-batch in flight on it has had its backward. What stays fp32 (norms) is
copied as it is, for the optimizer would write to that memory.

A synchronous schedule has one version, from the first forward behind an update to the next update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_dist.engine.stashing.versions import WeightStore, WeightVersion, version_bytes


@dataclass(frozen=True, slots=True)
class HalfWeights:
    """How a stage's layers get their weights.

    Attributes:
        dtype_of: What a parameter computes in.
        is_in_graph: Whether the cast is part of the graph, so that gradients come to the
            parameters; else versions are leaves of their own.
    """

    dtype_of: Callable[[nn.Parameter], torch.dtype]
    is_in_graph: bool = False

    def casts(self, layers: nn.Module) -> bool:
        """Tells whether any parameter of some layers computes in another precision than its own.

        Args:
            layers: Of a stage.
        """
        return any(self.dtype_of(p) != p.dtype for p in layers.parameters())

    def cast(self, parameter: nn.Parameter) -> Tensor:
        """Gives what a parameter computes as; itself where that is its own precision.

        Args:
            parameter: Of a stage.
        """
        return parameter.to(self.dtype_of(parameter))


class HalfWeightStore(WeightStore):
    """Makes versions by casting.

    Args:
        parameters: The stage's parameters with their names, trainable or not.
        half: How they are cast.
        max_age: As for :class:`WeightStore`.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        half: HalfWeights,
        max_age: int = 0,
    ) -> None:
        super().__init__(parameters, max_age)
        self._half = half
        self._frozen: dict[str, Tensor] = {}
        self._num_bytes = version_bytes(self._parameters.values(), half.dtype_of)

    @override
    def look(self) -> WeightVersion:
        with torch.no_grad():
            aliases = {name: self._half.cast(p) for name, p in self._parameters.items()}
        return WeightVersion(self.num_steps, aliases)

    @override
    def restart(self) -> None:
        super().restart()
        self._frozen.clear()
        if self._current is not None and not self._current.num_users:
            self._current = None  # others than the optimizer may have written to the masters

    @override
    def _aliases(self) -> Mapping[str, Tensor]:
        return {
            name: self._alias(p) if p.requires_grad else self._frozen_alias(name, p)
            for name, p in self._parameters.items()
        }

    def _alias(self, parameter: nn.Parameter) -> Tensor:
        if self._half.is_in_graph:
            return self._half.cast(parameter)
        with torch.no_grad():
            copy = self._half.cast(parameter)
            is_master = copy is parameter
            return (copy.clone() if is_master else copy).detach().requires_grad_()

    def _frozen_alias(self, name: str, parameter: nn.Parameter) -> Tensor:
        if name not in self._frozen:
            with torch.no_grad():
                self._frozen[name] = self._half.cast(parameter).detach()
        return self._frozen[name]

    @override
    def _part_from_current(self) -> None:
        """Does nothing: the optimizer writes to the masters."""
