"""Calls of a function for each saved tensor, each operation, or each call of a module.

Torch calls only the innermost saved-tensor hooks. So of two watches, or of a watch and a context
manager that moves activations to the host, the outer one would miss the tensors that are saved
inside the inner one. A watch therefore also calls the hooks that were active when it was entered.

``Module.compile`` compiles a module's call with the module's hooks. Hooks that exist for a few
batches only would be compiled too, and as they record different values each time, each call would
recompile them. So the compiled call is wrapped, and the callbacks stay outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_dist.engine.tensors.dtensor import local_part
from lightning_dist.engine.tensors.tree import tensors_in

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
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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


# Of their tensor they take no more than shape, dtype and device.
_SHAPES_ONLY = ("_like", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")
_aten = torch.ops.aten
_READS = (_aten._local_scalar_dense.default, _aten.equal.default)


class DependenceWatch(OperationWatch):
    """Marks what is computed from marked tensors, while entered.

    Values cannot tell it: NaNs as marks are lost in a comparison, and integers have none.

    A view is marked with its base, and a tensor that is written in place with what is written. What
    takes only a tensor's shape, dtype or device does not depend on it.

    Args:
        on_read: Called when a Python number is made of a marked tensor, as by ``if`` or ``item``.
    """

    def __init__(self, on_read: Callable[[], None]) -> None:
        super().__init__(self._note)
        self._on_read = on_read
        # torch keeps one Python object per storage as long as it is referenced.
        self._marked: set[torch.UntypedStorage] = set()

    def mark(self, tree: Any) -> None:
        """Marks a tree's tensors."""
        self._marked.update(_memory_of(t) for t in tensors_in(tree) if _has_memory(t))

    def has_marked(self, tree: Any) -> bool:
        """Returns whether one of a tree's tensors is marked."""
        return any(_has_memory(t) and _memory_of(t) in self._marked for t in tensors_in(tree))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Runs a block of code that is not watched."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if not self._marked or not self.has_marked((args, kwargs)):
            return
        if func in _READS:
            self._on_read()
        if isinstance(func, OpOverload):
            if func.overloadpacket.__name__.endswith(_SHAPES_ONLY):
                return
            if func._schema.is_mutable:
                self.mark((args, kwargs))
        self.mark(result)


def _has_memory(tensor: Tensor) -> bool:
    """Returns whether a tensor is no sparse one, of whatever format."""
    return tensor.layout == torch.strided


def _memory_of(tensor: Tensor) -> torch.UntypedStorage:
    return local_part(tensor).untyped_storage()


SavedTensorWatch = Callable[[Tensor], object]
"""Called with each saved tensor; its result lives as long as autograd keeps the tensor."""
_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class SavedTensorsWatch:
    """Calls a function for each tensor that autograd saves, while entered.

    Attributes:
        outer: The hooks around this watch, which save the tensors; None if autograd does.
    """

    def __init__(self, watch: SavedTensorWatch) -> None:
        self._watch = watch
        self._hooks = saved_tensors_hooks(self._pack, lambda kept: kept.unpack(kept.packed))
        self.outer: _Hooks | None = None

    def __enter__(self) -> SavedTensorsWatch:
        """Begins."""
        self.outer = _hooks_in_force()
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends; the watch's results live on with the saved tensors."""
        self._hooks.__exit__()

    def _pack(self, tensor: Tensor) -> _Kept:
        pack, unpack = self.outer or (_detached, lambda packed: packed)
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


def saves_by_hooks() -> bool:
    """Returns whether hooks save what a backward needs, as those of `torch.utils.checkpoint`."""
    hooks = None if torch.compiler.is_compiling() else _hooks_in_force()
    while hooks is not None:
        watch = getattr(hooks[0], "__self__", None)
        if not isinstance(watch, SavedTensorsWatch):
            return True
        hooks = watch.outer
    return False


Before = Callable[[nn.Module, Any], None]
"""Called with a module and its arguments."""
After = Callable[[nn.Module, Any, Any], None]
"""Called with a module, its arguments and its result; the result is None if the call failed."""


class CallWatch:
    """Watches a module's calls, even failed ones, until :meth:`remove`."""

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


def is_profiling() -> bool:
    """Returns whether torch's profiler runs in this thread; no public function says so."""
    return torch.autograd._profiler_enabled()
