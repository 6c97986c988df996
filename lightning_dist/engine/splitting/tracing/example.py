"""What a module is called with in a step, as an example to trace it with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_dist.engine.tensors.patch import replace_method

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named ones of a call."""

SET_AN_EXAMPLE = (
    " Set `self.example_input_array` in the LightningModule: a tensor, a tuple of positional"
    " arguments or a dict of named ones, like a small batch, in shape and dtype."
)


@dataclass(frozen=True)
class CallExample:
    """What shows how steps call the module that is traced.

    Attributes:
        inputs: What the whole module's ``forward`` takes, or the traced module's where that is not
            defined: a tensor, a tuple of positional arguments or a dict of named ones. None where
            no example was given.
        has_forward: Tells whether the whole module defines ``forward``; asked where no earlier
            trace has replaced it.
        observe: Takes the traced module and its path, and returns the arguments of the call;
            asked where no example was given.
    """

    inputs: Any = None
    has_forward: Callable[[], bool] = lambda: False
    observe: Callable[[nn.Module, str], Arguments] | None = None


class CallSeen(BaseException):  # noqa: N818  (it is not an error)
    """Leaves a forward where it calls the module that is looked at."""


@contextmanager
def watch_call(module: nn.Module) -> Iterator[list[Arguments]]:
    """Leaves what runs inside at the call of a module.

    Args:
        module: Its forward is not run.

    Yields:
        A list that gets the arguments of the call.
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
