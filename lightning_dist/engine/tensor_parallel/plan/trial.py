"""Run a copy of a module on its own, to see what it computes, so that nobody notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.engine.tensors.module_hooks import hooks_of
from lightning_dist.engine.tensors.rng import python_state_kept, seed_python, seeded

_TOLERANCE = 1e-3  # in float32, of the largest element
_SETTINGS = (bool, int, float, str, type(None))
_PLACES = ("layer", "idx", "index", "depth", "number")  # where a block is, not what it does


def kind_of(module: nn.Module) -> tuple[Any, ...]:
    """Names what several modules have in common that compute the same with other weights.

    Args:
        module: Any, of a model with more of its kind, as blocks are.
    """
    parts = list(module.modules())
    functions = (value for part in parts for value in vars(part).values() if callable(value))
    settings = (
        (name, value)
        for part in parts
        for name, value in vars(part).items()
        if isinstance(value, _SETTINGS) and not any(word in name for word in _PLACES)
    )
    shapes = (tensor.shape for tensor in [*module.parameters(), *module.buffers()])
    return (*map(type, parts), str(module), *map(id, functions), *settings, *shapes)


def random_copy(module: nn.Module) -> nn.Module:
    """Copies a module with other values on the CPU, for evaluation.

    Args:
        module: Whole; on any device, the meta device too.
    """
    known: dict[int, Any] = {}
    for parameter in module.parameters():
        value = torch.empty(parameter.shape)
        reach = (3 / parameter.shape[-1]) ** 0.5 if parameter.dim() > 1 else 0.5
        value.uniform_(-reach, reach).add_(float(parameter.dim() < 2))
        known[id(parameter)] = nn.Parameter(value, requires_grad=False)
    for buffer in module.buffers():
        kind = torch.float32 if buffer.is_floating_point() else buffer.dtype
        value = torch.ones(buffer.shape, dtype=kind)  # what it is on the meta device nobody knows
        known[id(buffer)] = value if buffer.is_meta else value.copy_(buffer)
    copy = deepcopy(module, known).eval()
    for part in copy.modules():  # nobody who watches the module is told of what its copy does
        for hooks in hooks_of(part):
            hooks.clear()
    return copy


def shared_copy(module: nn.Module) -> nn.Module:
    """Copies a module, but for its parameters and buffers.

    Args:
        module: From :func:`random_copy`.
    """
    known: dict[int, Any] = {id(t): t for t in [*module.parameters(), *module.buffers()]}
    return deepcopy(module, known)


@contextmanager
def on_the_side() -> Iterator[None]:
    """Leaves all random numbers as they are, and draws the same on all ranks.

    Yields:
        Nothing.
    """
    with python_state_kept(), seeded(0, device=torch.device("cpu")), torch.no_grad():
        seed_python(0)
        yield


def train_if_possible(copy: nn.Module, run: Callable[[], Tensor]) -> None:
    """Makes a module train, if it draws no numbers then: code may do something else in training.

    Args:
        copy: From :func:`random_copy`; its dropout drops nothing from then on.
        run: Runs it.
    """
    for part in copy.train().modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    first, second = run(), run()
    copy.train(torch.equal(first, second))


def differ(one: Tensor, other: Tensor) -> bool:
    """Tells whether two results are not one and the same, but for the order of sums.

    Args:
        one: Of float32.
        other: Of float32.
    """
    if one.shape != other.shape:
        return True
    return not float((one - other).abs().max()) <= _TOLERANCE * float(other.abs().max())
