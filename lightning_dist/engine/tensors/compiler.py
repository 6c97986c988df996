"""Keeps ``torch.compile`` out of a pipeline's own code, and lets it compile the layers inside.

A module that is compiled as a whole, or whose caller is compiled, is traced through the replaced
forward into the pipeline's code. That code has effects besides its result: it records graphs,
seeds generators and leaves steps by exceptions. Traced in pieces, it has lost the gradient of a
received activation. So the pipeline's code is never traced: the compiler is paused around it, and
resumed around the layers.

Torch has no public function for that: what ``torch.compiler.disable`` switches off stays off
inside. The private ``set_eval_frame`` is what ``disable`` and ``compile`` themselves call. It sets
this thread's compiler, and returns the one before. Nor is there a public name for whether a module
has been compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch._functorch.config
from torch import nn
from torch._C._dynamo.eval_frame import set_eval_frame

_REASON = (
    "Stages compile their layers apart from the code around them, so no graph holds both. Compile"
    " the layers one by one, or the pipelined module, instead of the code that calls it."
)


class PausedCompiler:
    """The compiler that is active around a pipelined module's call.

    Attributes:
        stays_paused: Whether :meth:`resume` compiles nothing, so that hooks on layers run.
    """

    def __init__(self) -> None:
        self.stays_paused = False
        self._active: Any = None

    @property
    def is_paused(self) -> bool:
        """Whether :meth:`resume` would compile."""
        return bool(self._active) and not self.stays_paused

    def pause(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function, never traced, with the compiler paused but in :meth:`resume`."""

        def paused(*arguments: Any, **keywords: Any) -> Any:
            active, before = set_eval_frame(None), self._active
            self._active = active or before
            try:
                return function(*arguments, **keywords)
            finally:
                self._active = before
                set_eval_frame(active)

        # Not recursive, so this frame alone is skipped and sees the compiler that is active.
        skipped: Callable[..., Any] = torch.compiler.disable(
            paused, recursive=False, reason=_REASON
        )
        return skipped

    def resume(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Runs a function without other effects than its result, compiled if the caller is."""
        if not self.is_paused:
            return function(*arguments, **keywords)
        paused = set_eval_frame(self._active)
        try:
            return _call(function, arguments, keywords)
        finally:
            set_eval_frame(paused)


def keep_saved_tensors(splits_backwards: bool) -> AbstractContextManager[None]:
    """Returns a context manager in which a compiled backward is one that may keep its graph.

    Torch lets a compiled backward overwrite the saved tensors ("donated buffers"), and refuses it
    in a backward that keeps the graph, as a split one does. It compiles another one where the first
    backward keeps the graph, but not if an earlier run has left the compiled code in a cache.
    """
    return _keeping() if splits_backwards else nullcontext()


@contextmanager
def _keeping() -> Iterator[None]:
    # What was compiled with another value of this setting is looked for under another key.
    settings = torch._functorch.config
    before = settings.donated_buffer
    settings.donated_buffer = False  # `patch` would leave a context variable for each batch
    try:
        yield
    finally:
        settings.donated_buffer = before


def refuse_wrapper(module: nn.Module) -> None:
    """Refuses a result of ``torch.compile`` as a module whose forward will be replaced.

    The replaced forward of such a wrapper would not be compiled, or run compiled inside of ours.

    Raises:
        ValueError: The module is such a wrapper.
    """
    if "_orig_mod" in module._modules:
        raise ValueError(
            "Use `model.compile()` in the place of `model = torch.compile(model)`: this model is"
            " cut by its own forward, which a wrapper hides."
        )


def refuse_compiled(blocks: nn.Module, path: str) -> None:
    """Refuses a sequence of blocks, which stages share, that has been compiled as a whole.

    Raises:
        ValueError: The sequence has been compiled.
    """
    if getattr(blocks, "_compiled_call_impl", None) is not None:
        raise ValueError(
            f"Compile the blocks of {path!r} one by one, `for block in blocks: block.compile()`, or"
            " the model that calls them, `model.compile()`: no stage has all of them."
        )


def _call(function: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
    # A frame of its own: torch compiles no frame of torch itself, such as that of a sequence, and
    # would compile each layer of it apart.
    return function(*arguments, **keywords)
