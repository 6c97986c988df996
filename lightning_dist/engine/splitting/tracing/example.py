"""An example of the traced module's call, with which it is traced.

It is made of ``example_input_array``, Lightning's own convention for the input of ``forward``, or
of the first step's call: the layers must be known before the optimizers are made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_dist.engine.precision.casts import as_in_step, cast
from lightning_dist.engine.precision.policy import HalfPrecision
from lightning_dist.engine.splitting.tracing.call import bind, example_of
from lightning_dist.engine.tensors.patch import replace_method

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""


@dataclass(frozen=True)
class CallExample:
    """The sources of an example call of the traced module.

    Attributes:
        inputs: Input of the whole module's ``forward``, or of the traced module's if the whole one
            has none: a tensor, a tuple of positional arguments or a dict of keyword arguments. None
            without an example.
        has_forward: Returns whether the whole module defines ``forward``; called if no earlier
            trace has replaced it.
        observe: Takes the traced module and its path, and returns the arguments of a call; called
            without an example.
    """

    inputs: Any
    has_forward: Callable[[], bool]
    observe: Callable[[nn.Module, str], Arguments]

    def arguments(self, module: nn.Module, path: str, half: HalfPrecision | None) -> Arguments:
        """Returns the arguments of a call of the traced module, which is at a path in the whole.

        Raises:
            ValueError: The whole module's forward does not call it.
        """
        if self.inputs is None:
            return self.observe(module.get_submodule(path), path)
        given = self._of_input(module, half)
        if not path:
            return given
        if not self.has_forward():
            return given if half is None else cast(given, half.dtype_into(module, path))
        with nullcontext() if half is None else as_in_step(module, half):
            return _seen_in_forward(module, path, given)

    def _of_input(self, module: nn.Module, half: HalfPrecision | None) -> Arguments:
        inputs = self.inputs
        dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
        if half is None and len(dtypes) == 1:
            # As Lightning's precision plugins make batches, which have converted the parameters.
            (dtype,) = dtypes
            inputs = cast(inputs, dtype)
        # As Lightning's summary does.
        if isinstance(inputs, Mapping):
            return (), dict(inputs)
        return (tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)), {}


def _seen_in_forward(module: nn.Module, path: str, arguments: Arguments) -> Arguments:
    """Runs the LightningModule's own forward up to the call of the traced module."""
    args, kwargs = arguments
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]  # norms on the way count
    with (
        watch_call(module.get_submodule(path)) as seen,
        torch.random.fork_rng(devices=()),
        torch.no_grad(),
    ):
        signature = inspect.signature(module.forward)
        call = example_of(signature, bind(signature, args, kwargs))
        device = next(module.parameters()).device
        args, kwargs = pytree.tree_map(
            lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf,
            (call.args, call.kwargs),
        )
        module.forward(*args, **kwargs)
    for buffer, value in before:
        buffer.copy_(value)
    if not seen:
        raise ValueError(
            f"The LightningModule's forward did not call {path!r}, which layers='trace' is to cut."
            " Name the module that it calls with layers='trace:path'."
        )
    return seen[0]


class _CallSeen(BaseException):  # noqa: N818
    """Ends a forward at its call of the watched module."""


@contextmanager
def watch_call(module: nn.Module) -> Iterator[list[Arguments]]:
    """Returns a context manager whose body ends at the call of a module, before its forward.

    Yields:
        A list to which the arguments of the call are appended.
    """
    seen: list[Arguments] = []

    def forward(*args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs))
        raise _CallSeen

    undo = replace_method(module, "forward", forward)
    try:
        with suppress(_CallSeen):
            yield seen
    finally:
        undo()
