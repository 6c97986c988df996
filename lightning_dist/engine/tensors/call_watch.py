"""Tells when a module is called and when it has returned, however it is compiled.

``Module.compile`` compiles a module's call with the hooks that it has. Some that come for a few
batches would be compiled with it, and what they note is never the same twice: each call would
compile them anew. So the compiled call is wrapped, and they stay outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

Before = Callable[[nn.Module, Any], None]
"""Told of a module and its arguments."""
After = Callable[[nn.Module, Any, Any], None]
"""Told of a module, its arguments and what it returned; that is None where it failed."""


class CallWatch:
    """Watches until :meth:`remove`.

    Args:
        module: Whose calls.
        before: Called first.
        after: Called last, always.
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
        """Leaves the module alone."""
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
