"""The arguments of a module's call in a step, as an example for a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_dist.engine.tensors.patch import replace_method

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""

SET_AN_EXAMPLE = (
    " Set `self.example_input_array` in the LightningModule: a tensor, a tuple of positional"
    " arguments or a dict of named ones, like a small batch, in shape and dtype."
)


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

    inputs: Any = None
    has_forward: Callable[[], bool] = lambda: False
    observe: Callable[[nn.Module, str], Arguments] | None = None


class CallSeen(BaseException):  # noqa: N818  (it is not an error)
    """Ends a forward at its call of the watched module."""


@contextmanager
def watch_call(module: nn.Module) -> Iterator[list[Arguments]]:
    """Returns a context manager whose body ends at the call of a module.

    Args:
        module: The watched module; its forward does not run.

    Yields:
        A list to which the arguments of the call are appended.
    """
    seen: list[Arguments] = []

    def forward(*args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs))
        raise CallSeen

    undo = replace_method(module, "forward", forward)
    try:
        yield seen
    except CallSeen:
        pass
    finally:
        undo()
