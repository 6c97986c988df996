"""Versions of a stage's weights in half precision, without stashed masters.

With fp32 masters a version *is* the cast: 2 bytes per parameter, freed when the last micro-batch in
flight on it has had its backward. A step needs no copy, since no micro-batch computes with the
masters. Parameters that stay fp32 (norms) are copied. A synchronous schedule has one version, from
the first forward after an update to the next update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_dist.engine.stashing.versions import ComputeWeights


@dataclass(frozen=True, slots=True)
class HalfWeights:
    """How a stage's layers get their weights.

    Attributes:
        dtype_of: Returns the data type in which a parameter computes.
        is_in_graph: Whether the cast is part of the autograd graph, so that gradients come to the
            parameters; otherwise versions are leaves of their own.
    """

    dtype_of: Callable[[nn.Parameter], torch.dtype]
    is_in_graph: bool = False

    def casts(self, layers: nn.Module) -> bool:
        """Returns whether a parameter of the layers computes in another precision than its own."""
        return any(self.dtype_of(p) != p.dtype for p in layers.parameters())

    def cast(self, parameter: nn.Parameter) -> Tensor:
        """Returns the cast of a parameter; the parameter itself if the data type is the same."""
        return parameter.to(self.dtype_of(parameter))


class CastWeights(ComputeWeights):
    """Casts of the parameters, which are the masters, made anew for each version."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], half: HalfWeights) -> None:
        super().__init__(parameters)
        self._half = half
        self._frozen: dict[str, Tensor] = {}

    @override
    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        return self._half.dtype_of(parameter)

    @override
    def aliases(self) -> Mapping[str, Tensor]:
        return {
            name: self._alias(name, p) if p.requires_grad else self._frozen_alias(name, p)
            for name, p in self.parameters.items()
        }

    def _alias(self, name: str, parameter: nn.Parameter) -> Tensor:
        self._frozen.pop(name, None)  # it changes from now on, and may be frozen again
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
    def again(self, alias: Tensor, parameter: nn.Parameter) -> Tensor:
        if self._half.is_in_graph and parameter.requires_grad:
            return self._half.cast(parameter)
        return super().again(alias, parameter)

    @override
    def look(self) -> Mapping[str, Tensor]:
        with torch.no_grad():
            return {name: self._half.cast(p) for name, p in self.parameters.items()}

    @override
    def leave(self) -> None:
        """Does nothing, since the optimizer writes to the masters."""

    @override
    def before_step(self) -> None:
        late = [n for n, p in self.parameters.items() if p.grad is not None and n in self._frozen]
        for name in late:  # frozen since the batch whose gradient comes now
            del self._frozen[name]

    @override
    def restart(self) -> None:
        self._frozen.clear()
