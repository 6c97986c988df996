"""Checks that a stage, or a server, can update its parameters without those of others.

It gives an optimizer its own parameters only. One that looks at all parameters, for a
norm of all gradients say, would go on without an error, and train another model. What an
optimizer's code does cannot be read, so a copy of it is tried on a few small tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_PER_GROUP, _STEPS = 2, 3


def check_separate_updates(optimizer: Optimizer, holder: str) -> None:
    """Checks that an optimizer of a whole model may be given a part of the parameters.

    Args:
        optimizer: The optimizer, with all parameters. Of torch's own, LBFGS alone is refused,
            elsewhere.
        holder: What has a part: ``"stage"``, ``"server"``.

    Raises:
        ValueError: It keeps lists beside its groups, or updates depend on other parameters.
    """
    if type(optimizer).__module__.startswith("torch.optim."):
        return
    kind = type(optimizer).__name__
    found = _parallel_list(optimizer)
    if found is not None:
        raise ValueError(
            f"{kind} keeps a list of as many tensors as it has parameters, {found!r}. A {holder}"
            " has a part of the parameters, which would meet other entries of the list. Keep them"
            " in `self.state[p]`, by parameter, or use DDPStrategy."
        )
    if _are_coupled(optimizer):
        raise ValueError(
            f"{kind} updates a parameter by the gradients of others too, by a norm or an estimate,"
            f" and a {holder} has its own gradients only. Use DDPStrategy or FSDPStrategy, or an"
            " optimizer that updates each parameter by itself."
        )


def _parallel_list(optimizer: Optimizer) -> str | None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    shapes, own = [p.shape for p in parameters], set(parameters)
    for name, value in vars(optimizer).items():
        listed = [*_listed(value)]
        if [t.shape for t in listed] == shapes and not own.issuperset(listed):
            return name
    return None


def _listed(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _listed(item)


def _are_coupled(optimizer: Optimizer) -> bool:
    """Returns whether another gradient of one parameter changes the update of another one."""
    try:
        updated = [_updated(optimizer, last) for last in (1.0, 3.0)]
    except Exception:  # noqa: BLE001  (an optimizer may need more than gradients)
        return False
    return not all(map(torch.equal, *updated))


def _updated(optimizer: Optimizer, last_gradient: float) -> list[Tensor]:
    """Runs a copy of an optimizer; returns all parameters but the last."""
    given = [p for group in optimizer.param_groups for p in group["params"]]
    memo: dict[int, Any] = {id(p): _small(p) for p in given}
    # torch's own way of copying leaves out what an optimizer has besides groups and state, such as
    # another optimizer. The object's `step` is a scheduler's, around the class's.
    copy: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = copy
    vars(copy).update({n: deepcopy(v, memo) for n, v in vars(optimizer).items() if n != "step"})
    parameters = []
    for group in copy.param_groups:
        group["params"] = group["params"][:_PER_GROUP]
        parameters += group["params"]

    def closure() -> Tensor:
        for index, parameter in enumerate(parameters, 1):
            scale = last_gradient if index == len(parameters) else 1.0
            parameter.grad = parameter.detach() * (scale / index)  # another one where it has moved
        return torch.ones(())

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        for _ in range(_STEPS):
            closure()
            # Of the class: schedulers have replaced that of the object.
            type(copy).step(copy, cast(Any, closure))
    return [parameter.detach() for parameter in parameters[:-1]]


def _small(parameter: Tensor) -> nn.Parameter:
    size = (2,) * parameter.dim()
    return nn.Parameter(torch.ones(size, dtype=parameter.dtype), parameter.requires_grad)
