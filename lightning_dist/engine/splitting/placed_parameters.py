"""Parameters that belong to one stage, though no module of its layers holds them.

A class token is an attribute of the module that holds the blocks, which is in place on all ranks.
The stage of the first layer or of the last one has such a parameter: in its versions of weights,
its gradients and its updates. On other ranks the modules stay in place without it, and NaNs of its
shape are there while a forward runs.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from lightning_dist.engine.splitting.removed_tensors import RemovedTensors
from lightning_dist.engine.tensors.module_tree import place_of
from lightning_dist.engine.tensors.patch import replaced
from lightning_dist.engine.tensors.skeleton import without_values

_MOST_NANS = 2**20


class PlacedParameters:
    """Parameters in a module that one stage has; none at first.

    Args:
        module: The module.

    Attributes:
        kept_as: Name of the module's attribute that keeps the parameters from a cut to later runs.
        is_first: Whether the stage is that of the first layer, or that of the last one.
        prefix: Prefix of the parameters' names in the user's module.
        compute_dtypes: The dtypes in which parameters compute on their own rank, by name. A
            parameter without an entry computes in its own dtype.
    """

    kept_as: ClassVar[str]
    is_first: ClassVar[bool]

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.prefix = ""
        self.compute_dtypes: dict[str, torch.dtype] = {}
        refusal = (
            f"The value of {{name!r}}, which lives on the {'first' if self.is_first else 'last'}"
            " stage, was asked for on another one. Use it in the model's forward only, where that"
            " stage runs, or hand on what is computed from it."
        )
        self._removed = RemovedTensors(module, refusal)
        self._shapes: dict[str, Tensor] = {}
        self._device = torch.device("cpu")

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """Returns the placed parameters of a module that an earlier run has cut, or none."""
        known = vars(module).get(cls.kept_as)
        return known if isinstance(known, cls) else cls(module)

    def __contains__(self, name: str) -> bool:
        """Returns whether a name in the module is that of a placed parameter."""
        return name in self._shapes

    @property
    def names(self) -> set[str]:
        """The parameters' names in the user's module; of a tied parameter all names."""
        return {self.prefix + name for name in self._shapes}

    @property
    def remote_names(self) -> set[str]:
        """The names of parameters that another rank has."""
        return {self.prefix + name for name in self._removed.names}

    @property
    def num_elements(self) -> int:
        """The number of elements of all parameters; a tied one counts once."""
        return sum(shape.numel() for shape in {id(s): s for s in self._shapes.values()}.values())

    def add(self, parameters: dict[str, nn.Parameter]) -> None:
        """Adds parameters that all ranks have so far; a tied one by all of its names."""
        by_identity: dict[int, Tensor] = {}
        for name, parameter in parameters.items():
            shape = by_identity.setdefault(id(parameter), without_values(parameter))
            self._shapes.setdefault(name, shape)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that this rank has, by their first names."""
        own = self._shapes.keys() - self._removed.names
        named = self.module.named_parameters()
        return {self.prefix + name: parameter for name, parameter in named if name in own}

    def put_into(self, stage: nn.Module) -> None:
        """Registers the parameters in the module of a stage's layers, under names of their own."""
        for name, parameter in self.parameters().items():
            stage.register_parameter(f"beside/{name.replace('.', '/')}", parameter)

    def finish_cut(self, *, is_here: bool) -> None:
        """Ends a cut: removes the parameters from the module on a rank without their stage."""
        if self._shapes:
            vars(self.module)[self.kept_as] = self
        self._removed.take(set() if is_here else self._shapes.keys() - self._removed.names)

    def as_empty(self, device: torch.device | None) -> AbstractContextManager[None]:
        """Returns a context manager with all parameters in place, remote ones without values."""
        return self._removed.as_empty(device)

    def attach(self, device: torch.device) -> None:
        """Prepares for steps on a device."""
        self._device = device
        self._removed.describe(device)

    def as_remote(self) -> AbstractContextManager[None]:
        """Returns a context manager with remote tensors in place; a read of a value is an error."""
        return self._removed.as_remote()

    def unknown(self) -> dict[str, Tensor]:
        """Returns NaNs for :meth:`in_place`; a tied parameter's are the same."""
        named = self._shapes.items()
        dtypes = {  # of a tied one by any of its names
            id(shape): self.compute_dtypes[self.prefix + name]
            for name, shape in named
            if self.prefix + name in self.compute_dtypes
        }
        made = {
            id(shape): _nans(shape, dtypes.get(id(shape), shape.dtype), self._device)
            for _, shape in named
        }
        return {name: made[id(shape)] for name, shape in self._shapes.items()}

    def in_place(self, values: dict[str, Tensor]) -> AbstractContextManager[None]:
        """Returns a context manager with other tensors in place, by names in the module."""
        places = [(*place_of(self.module, name), value) for name, value in values.items()]
        return replaced(places)


class FirstParameters(PlacedParameters):
    """What modules around blocks hold themselves, and compute with ahead of the blocks."""

    kept_as = "_lightning_dist_first_parameters"
    is_first = True


class LastParameters(PlacedParameters):
    """What modules around blocks hold themselves, and compute with behind the blocks."""

    kept_as = "_lightning_dist_last_parameters"
    is_first = False


def placed_in(module: nn.Module) -> list[PlacedParameters]:
    """Lists what earlier cuts have given to stages, of a module and of all modules in it."""
    kept = (value for part in module.modules() for value in vars(part).values())
    return [value for value in kept if isinstance(value, PlacedParameters)]


def _nans(shape: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns NaNs that a forward may write into, anew for each one, unless they are many."""
    if shape.numel() > _MOST_NANS:
        return torch.full((), math.nan, dtype=dtype, device=device).expand(shape.shape)
    return torch.full(shape.shape, math.nan, dtype=dtype, device=device)
