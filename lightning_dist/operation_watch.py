"""Shows each operation on plain tensors to somebody, whoever asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

Watch = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Told of each operation: the function, its arguments, those by name, and what it returned."""


class OperationWatch(TorchDispatchMode):
    """Watches while it is entered.

    Args:
        watch: Told of each operation.
    """

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
        if DTensor in types:
            return NotImplemented  # it turns into operations on plain tensors, which come back
        named = kwargs or {}
        result = func(*args, **named)
        self._watch(func, args, named, result)
        return result
