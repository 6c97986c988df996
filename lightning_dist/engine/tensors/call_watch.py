"""Callbacks before and after a module's call, compiled or not.

``Module.compile`` compiles a module's call with the module's hooks. Hooks that exist for a few
batches only would be compiled too, and as they record different values each time, each call would
recompile them. So the compiled call is wrapped, and the callbacks stay outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

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
