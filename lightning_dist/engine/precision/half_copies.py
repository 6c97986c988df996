"""Copies of parameters in half precision, and how a module computes with them.

The cast is an operation of the graph, so a backward leaves fp32 gradients with the parameters
themselves, where DistributedDataParallel and everybody else expect them. A parameter that is used
several times is cast once: its gradient is summed in half precision as it would be with half
weights, and becomes fp32 at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Copies = Mapping[nn.Parameter, Tensor]
"""What stands for a parameter."""


def half_copies(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> Copies:
    """Casts parameters, in the graph if gradients are enabled.

    Args:
        parameters: The masters.
        dtype: Of the copies.
    """
    return {parameter: parameter.to(dtype) for parameter in parameters}


@contextmanager
def lent(module: nn.Module, copies: Copies) -> Iterator[None]:
    """Puts copies in the place of a module's parameters while entered.

    ``torch.func.functional_call`` does that for one call of the module; a Lightning step is none,
    and its backward, in which activations may be computed anew, is a call of nothing. Nobody else
    may look at the parameters meanwhile: optimizers and reducers have them by themselves.

    Args:
        module: Of any depth; a shared parameter is found everywhere.
        copies: Those of other modules are not looked at.

    Yields:
        Nothing.
    """
    # The dict that `functional_call` writes to. `setattr` would change the parameters' order.
    places = [
        (part._parameters, name, parameter)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None and parameter in copies
    ]
    for parameters, name, parameter in places:
        parameters[name] = copies[parameter]  # type: ignore[assignment]
    try:
        yield
    finally:
        for parameters, name, parameter in places:
            parameters[name] = parameter
