"""Optimizers, and lists in attributes, that were made before the module's parameters were sharded.

On one device an optimizer may be made at any time, in ``__init__`` for instance. Sharding replaces
the module's parameters by new ones. The new parameters are put into the optimizer's groups and into
the lists, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_dist.engine.tensors.module_tree import map_other_tensors


class EarlyParameters:
    """A module's parameters before it is sharded, held by weak references."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._names = WeakTensorKeyDictionary()
        for name, parameter in module.named_parameters():
            self._names[parameter] = name

    def forget_present(self) -> None:
        """Forgets the parameters that the module still has.

        torch cannot move a tensor with weak references to another device.
        """
        for parameter in self._module.parameters():
            self._names.pop(parameter, None)

    def replace_in_attributes(self) -> None:
        """Puts the module's present parameters into lists of them that its attributes hold."""
        map_other_tensors(self._module, self._replaced())

    def replace_in(self, optimizers: Sequence[Optimizer]) -> None:
        """Puts the module's present parameters into optimizers.

        An optimizer that has state of its parameters keeps them; naming its groups raises an error.
        """
        replaced = self._replaced()
        for optimizer in optimizers:
            if any(parameter in self._names for parameter in optimizer.state):
                continue
            for group in optimizer.param_groups:
                group["params"] = [replaced(parameter) for parameter in group["params"]]

    def _replaced(self) -> Callable[[Tensor], Tensor]:
        """Returns the function from an earlier parameter to the present one of its name."""
        present = dict(self._module.named_parameters())

        def replaced(parameter: Tensor) -> Tensor:
            name = self._names.get(parameter)
            return parameter if name is None else present.get(name, parameter)

        return replaced
