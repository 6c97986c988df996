"""Know the memory of the weights that modules compute with.

These are not the parameters everywhere: stages of a pipeline run on versions of them, and half
precision on copies, which take the parameters' places while a module is called.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from lightning_dist.engine.tensors.local_part import local_part
from lightning_dist.engine.tensors.remote_tensor import AbsentTensor


class WeightsInUse:
    """Holds addresses, of the calls that run while it is entered.

    A version may be gone after the call, and its memory somebody else's.
    """

    def __init__(self) -> None:
        self._calls: list[frozenset[int]] = []
        self._handles: list[RemovableHandle] = []

    def __contains__(self, place: object) -> bool:
        """Whether some memory is that of a weight in use."""
        return any(place in call for call in self._calls)

    def __enter__(self) -> WeightsInUse:
        """Begins."""
        self._handles = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        """Ends."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._calls.clear()

    def _begin(self, module: nn.Module, _: Any) -> None:
        here = (p for p in module.parameters() if not isinstance(p, AbsentTensor))
        own = (local_part(p.detach()) for p in here)
        self._calls.append(frozenset(p.untyped_storage().data_ptr() for p in own))

    def _end(self, *_: Any) -> None:
        self._calls.pop()
