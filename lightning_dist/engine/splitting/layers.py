"""Where a pipelined module's layers are, and how they are run.

A layer is what a partition counts. In an ``nn.Sequential`` each child is one, and a stage runs its
own one after the other, whatever the module's caller gave it. Other modules know more ways to hold
layers (:mod:`.splitting.blocks`), so what cuts and runs a model asks this class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override


@dataclass(frozen=True, slots=True)
class Part:
    """One submodule of a layer.

    Attributes:
        name: In the pipelined module.
        module: What bears that name now; another rank's is a
            :class:`.ForeignLayer`.
        layer_index: The layer.
    """

    name: str
    module: nn.Module
    layer_index: int


class Layers(ABC):
    """The layers of a pipelined module, in the order in which they run.

    Args:
        module: The pipelined module.
        names: Of the submodules that each layer consists of.
    """

    def __init__(self, module: nn.Module, names: Sequence[Sequence[str]]) -> None:
        self.module = module
        self.names = tuple(tuple(group) for group in names)

    def __len__(self) -> int:
        """Counts the layers."""
        return len(self.names)

    @property
    def users_module(self) -> nn.Module:
        """The module in the user's model by which a step reads parameters of the layers."""
        return self.module

    @property
    def origin(self) -> str:
        """What the layers were before they were layers, in a few words; empty where it is plain."""
        return ""

    def parts(self) -> list[Part]:
        """Lists all submodules of all layers."""
        return [
            Part(name, self.module.get_submodule(name), index)
            for index, group in enumerate(self.names)
            for name in group
        ]

    @abstractmethod
    def stage(self, first: int, end: int) -> nn.Module:
        """Makes what runs some of the layers, and holds them under their own names.

        It is called with what :meth:`layer_input` gives.

        Args:
            first: The first of them; all must be on this rank.
            end: Behind the last.
        """

    @abstractmethod
    def layer_input(
        self, is_first: bool, received: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> Any:
        """Gives what a stage's layers run on.

        Args:
            is_first: Whether it is the first stage.
            received: From the stage before.
            arguments: Of the call of the pipelined module in the user's step.
            keywords: Of that call.
        """

    def beside(self, layer_index: int) -> dict[str, Tensor]:
        """Gives the tensors that a layer of this rank uses and its submodules do not hold.

        Args:
            layer_index: The layer.
        """
        return {}

    def in_step(self, device: torch.device) -> AbstractContextManager[None]:
        """Makes what to enter while a user's step runs.

        Args:
            device: Where tensors would be if this rank had them.
        """
        return nullcontext()

    @abstractmethod
    def settle(self, own_layers: Sequence[int], beside: Mapping[str, Tensor]) -> None:
        """Ends a change of the cut, when the submodules are where they belong.

        Args:
            own_layers: Of this rank from now on.
            beside: What :meth:`beside` gave of those that came.
        """

    @abstractmethod
    def attach(self) -> None:
        """Prepares the module, cut by now, for the calls of stages."""

    @abstractmethod
    def detach(self) -> None:
        """Undoes :meth:`attach`."""


class LayerSequence(Layers):
    """The children of an ``nn.Sequential``.

    Args:
        module: The sequence.
    """

    def __init__(self, module: nn.Sequential) -> None:
        # `named_children` leaves out a child that was there before, one activation for all say.
        super().__init__(module, [(name,) for name in module._modules])

    @override
    def stage(self, first: int, end: int) -> nn.Sequential:
        own = (part for part in self.parts() if first <= part.layer_index < end)
        return nn.Sequential(OrderedDict((part.name, part.module) for part in own))

    @override
    def layer_input(
        self, is_first: bool, received: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> Any:
        return arguments[0] if is_first else received

    @override
    def settle(self, own_layers: Sequence[int], beside: Mapping[str, Tensor]) -> None:
        """Does nothing."""

    @override
    def attach(self) -> None:
        """Does nothing: nobody calls the sequence but the user's step."""

    @override
    def detach(self) -> None:
        """Does nothing."""


def layers_in(module: nn.Sequential | Layers) -> Layers:
    """Gives the layers of a sequence, or what has been found out about another module.

    Args:
        module: Either.
    """
    return module if isinstance(module, Layers) else LayerSequence(module)
