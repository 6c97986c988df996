"""Where an optimizer will have moved weights some updates from now, as far as it knows today.

An optimizer with momentum goes on in its direction when gradients stay away, so its own state says
where weights will about be when a batch's update is applied (SpecTrain: Chen et al. 2018, section
3.2; XPipe: Guan et al. 2019, section 4). Weight decay is left out. ``lr`` is the rate of the next
update.

==================  ==================================================================
optimizer           after ``s`` more updates
==================  ==================================================================
SGD with momentum   ``W - lr * (g - g ** (s + 1)) / (1 - g) * buffer``, ``g`` the momentum;
                    ``g`` times that way where it is Nesterov's
Adam and its like   ``W - lr * s * m / (sqrt(v) + eps)``, ``m`` and ``v`` without bias
==================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, NAdam, Optimizer, RAdam

_ADAMS = (Adam, NAdam, RAdam)  # AdamW is an Adam


def check_extrapolation(optimizer: Optimizer) -> None:
    """Checks that an optimizer's next updates can be foreseen.

    Args:
        optimizer: Any.

    Raises:
        ValueError: They cannot.
    """
    has_momentum = isinstance(optimizer, SGD) and all(g["momentum"] for g in optimizer.param_groups)
    if not has_momentum and not isinstance(optimizer, _ADAMS):
        raise ValueError(
            f"staleness_correction='predict' does not know where {type(optimizer).__name__} goes:"
            " it takes SGD with momentum, Adam, AdamW, NAdam and RAdam. Use one of"
            " these, or another `staleness_correction`."
        )


@torch.no_grad()
def extrapolated(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], num_updates: int
) -> dict[str, Tensor]:
    """Gives copies of parameters as they will be about some updates later.

    Args:
        optimizer: Theirs.
        parameters: By name; those of other ranks are not looked at.
        num_updates: How many.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    found: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is not None:
                state = optimizer.state.get(parameter, {})
                found[name] = parameter.detach().clone()
                if isinstance(optimizer, SGD):
                    _coast(found[name], group, state, num_updates)
                else:
                    _go_on(found[name], group, state, num_updates)
    return found


def _coast(
    weight: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], num_updates: int
) -> None:
    """Moves a weight as SGD does when gradients stay away."""
    buffer, momentum = state.get("momentum_buffer"), group["momentum"]
    if buffer is not None:
        way = sum(momentum**i for i in range(1, num_updates + 1))
        way *= momentum if group["nesterov"] else 1.0
        weight.add_(buffer, alpha=-float(group["lr"]) * way)


def _go_on(
    weight: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], num_updates: int
) -> None:
    """Moves a weight as Adam does when gradients stay what they were on average."""
    if "exp_avg" not in state:
        return
    beta1, beta2 = group["betas"]
    step = float(state["step"])
    variance = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    spread = variance.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    rate = float(group["lr"]) * num_updates / (1 - beta1**step)
    weight.addcdiv_(state["exp_avg"], spread, value=-rate)
