"""Notes by hooks which parameters backwards have used."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class UsedParameters:
    """The parameters of a module for which backwards have made gradients on this rank."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = tuple(module.parameters())
        self._used: set[Tensor] = set()
        self._hooks: dict[Tensor, RemovableHandle] = {}

    def watch(self) -> None:
        """Hooks into each parameter that is trainable now."""
        for parameter in self._parameters:
            if parameter.requires_grad and parameter not in self._hooks:
                hook = parameter.register_post_accumulate_grad_hook(self._used.add)
                self._hooks[parameter] = hook

    def take(self, parameters: Sequence[Tensor]) -> list[bool]:
        """Returns for each parameter whether it was used since this was last asked."""
        were_used = [parameter in self._used for parameter in parameters]
        self._used.difference_update(parameters)
        return were_used

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
