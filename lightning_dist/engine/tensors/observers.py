"""Shows each tensor that autograd keeps for a backward to somebody, whoever asks for it.

Torch asks the innermost of its hooks only. So of two that watch, or of one that watches and one
that moves activations to the host, the outer one would miss what is kept meanwhile. A watch hands
each tensor on to the hooks that it was entered in.

Shows each operation on plain tensors to somebody, whoever asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

Watch = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Told of each operation: the function, its arguments, those by name, and what it returned."""


class OperationWatch(TorchDispatchMode):
    """Watches while it is entered.

    Args:
        watch: Told of each operation, after it.
    """

    # Such as torch.cond and flex_attention: seen as a whole, but not in the way of those who call.
    supports_higher_order_operators = True

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if types and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # it turns into operations on plain tensors, which come back
        named = kwargs or {}
        if torch.is_inference_mode_enabled() and isinstance(func, OpOverload):
            with self:
                parts = func.decompose(*args, **named)
            if parts is not NotImplemented:
                return parts  # autograd has done this already, where there is any
        result = func(*args, **named)
        self._watch(func, args, named, result)
        return result

    @override
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Sees what compiled code calls, for without this torch would never compile it again."""
        return True


SavedTensorWatch = Callable[[Tensor], object]
"""Told of each tensor; what it returns lives for as long as autograd needs the tensor."""
_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class SavedTensorsWatch:
    """Watches while it is entered.

    Args:
        watch: Told of each tensor.
    """

    def __init__(self, watch: SavedTensorWatch) -> None:
        self._watch = watch
        self._hooks = saved_tensors_hooks(self._pack, lambda kept: kept.unpack(kept.packed))
        self._outer: _Hooks = (_detached, _same)

    def __enter__(self) -> SavedTensorsWatch:
        """Begins."""
        self._outer = _hooks_in_force() or (_detached, _same)
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends; what the watch has returned stays with what is kept."""
        self._hooks.__exit__()

    def _pack(self, tensor: Tensor) -> _Kept:
        pack, unpack = self._outer
        return _Kept(pack(tensor), unpack, self._watch(tensor))


class _Kept:
    """What autograd holds in the place of a tensor."""

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor], token: object) -> None:
        self.packed = packed
        self.unpack = unpack
        self._token = token


def _detached(tensor: Tensor) -> Tensor:
    # A result of the operation that keeps it would hold its own graph.
    return tensor if tensor.is_leaf else tensor.detach()


def _same(packed: Tensor) -> Tensor:
    return packed


def _hooks_in_force() -> _Hooks | None:
    """Gives the hooks that torch would ask now; it has no public name for them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)
