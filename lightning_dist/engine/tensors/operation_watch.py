"""Shows each operation on plain tensors to somebody, whoever asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
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
