"""Run a copy of a module on its own, to see what it computes, so that nobody notices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.module_hooks import hooks_of
from lightning_dist.rng import python_state_kept, seed_python, seeded

_TOLERANCE = 1e-3  # in float32, of the largest element


def kind_of(module: nn.Module) -> tuple[Any, ...]:
    """Names what several modules have in common that compute the same with other weights.

    Args:
        module: Any, of a model with more of its kind, as blocks are.
    """
    parts = list(module.modules())
    functions = (value for part in parts for value in vars(part).values() if callable(value))
    shapes = (tensor.shape for tensor in [*module.parameters(), *module.buffers()])
    return (*map(type, parts), str(module), *map(id, functions), *shapes)


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


def differ(one: Tensor, other: Tensor) -> bool:
    """Tells whether two results are not one and the same, but for the order of sums.

    Args:
        one: Of float32.
        other: Of float32.
    """
    if one.shape != other.shape:
        return True
    return not float((one - other).abs().max()) <= _TOLERANCE * float(other.abs().max())
