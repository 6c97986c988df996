"""Optimizers that were made before the module's parameters were sharded.

On one device an optimizer may be made at any time, in ``__init__`` for instance. Shards, and pieces
of layers, are other parameters, which have the places of the first ones in the module. They get the
places in the optimizer's groups, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary


class EarlyParameters:
    """A module's parameters as they are before it is sharded. Only optimizers keep them alive.

    Args:
        module: The user's, whole.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._names = WeakTensorKeyDictionary()
        for name, parameter in module.named_parameters():
            self._names[parameter] = name

    def forget_present(self) -> None:
        """Forgets the parameters that are still the module's.

        torch cannot move to another device what is referred to so.
        """
        for parameter in self._module.parameters():
            self._names.pop(parameter, None)

    def replace_in(self, optimizers: Sequence[Optimizer]) -> None:
        """Gives optimizers the parameters that the module has now.

        One with a state of its parameters keeps them, and is refused where it gets names.

        Args:
            optimizers: Of the module.
        """
        present = dict(self._module.named_parameters())

        def replaced(parameter: Tensor) -> Tensor:
            name = self._names.get(parameter)
            return parameter if name is None else present.get(name, parameter)

        for optimizer in optimizers:
            if any(parameter in self._names for parameter in optimizer.state):
                continue
            for group in optimizer.param_groups:
                group["params"] = [replaced(parameter) for parameter in group["params"]]
