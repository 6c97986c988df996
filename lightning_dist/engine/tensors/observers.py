"""Calls of a function for each saved tensor, each operation, or each call of a module.

Torch calls only the innermost saved-tensor hooks. So of two watches, or of a watch and a context
manager that moves activations to the host, the outer one would miss the tensors that are saved
inside the inner one. A watch therefore also calls the hooks that were active when it was entered.

``Module.compile`` compiles a module's call with the module's hooks. Hooks that exist for a few
batches only would be compiled too, and as they record different values each time, each call would
recompile them. So the compiled call is wrapped, and the callbacks stay outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

Watch = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Called with each operation: the function, its positional and keyword arguments, its result."""


class OperationWatch(TorchDispatchMode):
    """Calls a function after each operation on plain tensors, while entered."""

    # Such as torch.cond and flex_attention: each is one operation, and stays usable.
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
            return NotImplemented  # the subclass runs operations on plain tensors, seen here later
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
        """Keeps code compiled that runs inside; else torch would never compile it again."""
        return True


SavedTensorWatch = Callable[[Tensor], object]
"""Called with each saved tensor; its result lives as long as autograd keeps the tensor."""
_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class SavedTensorsWatch:
    """Calls a function for each tensor that autograd saves, while entered."""

    def __init__(self, watch: SavedTensorWatch) -> None:
        self._watch = watch
        self._hooks = saved_tensors_hooks(self._pack, lambda kept: kept.unpack(kept.packed))
        self._outer: _Hooks = (_detached, lambda packed: packed)

    def __enter__(self) -> SavedTensorsWatch:
        """Begins."""
        self._outer = _hooks_in_force() or (_detached, lambda packed: packed)
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends; the watch's results live on with the saved tensors."""
        self._hooks.__exit__()

    def _pack(self, tensor: Tensor) -> _Kept:
        pack, unpack = self._outer
        return _Kept(pack(tensor), unpack, self._watch(tensor))


class _Kept:
    """The object that autograd saves in place of a tensor."""

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor], token: object) -> None:
        self.packed = packed
        self.unpack = unpack
        self._token = token


def _detached(tensor: Tensor) -> Tensor:
    # An operation's own result, saved by the operation, would keep its own autograd graph alive.
    return tensor if tensor.is_leaf else tensor.detach()


def _hooks_in_force() -> _Hooks | None:
    """Returns the active saved-tensor hooks, for which torch has no public name."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


Before = Callable[[nn.Module, Any], None]
"""Called with a module and its arguments."""
After = Callable[[nn.Module, Any, Any], None]
"""Called with a module, its arguments and its result; the result is None if the call failed."""


class CallWatch:
    """Watches a module's calls until :meth:`remove`.

    Args:
        module: The module to watch.
        before: Called before each call.
        after: Called after each call, even a failed one.
    """

    def __init__(self, module: nn.Module, before: Before, after: After) -> None:
        self._module = module
        self._before, self._after = before, after
        self._handles: list[RemovableHandle] = []
        # torch has no public name for the call that it compiles.
        self._compiled: Callable[..., Any] | None = module._compiled_call_impl
        if self._compiled is None:
            self._handles = [
                module.register_forward_pre_hook(before),
                module.register_forward_hook(after, always_call=True),
            ]
        else:
            module._compiled_call_impl = self._call

    def remove(self) -> None:
        """Stops watching."""
        for handle in self._handles:
            handle.remove()
        if self._compiled is not None:
            self._module._compiled_call_impl = self._compiled

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        assert self._compiled is not None
        self._before(self._module, args)
        output = None
        try:
            output = self._compiled(*args, **kwargs)
        finally:
            self._after(self._module, args, output)
        return output
