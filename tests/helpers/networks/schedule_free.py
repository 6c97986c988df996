"""An optimizer that counts its steps in its parameter groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class ScheduleFree(Optimizer):
    """Averages its iterates as schedule-free SGD does, with the counters in its groups.

    Gradients are taken at the iterate: what is under test is ``k`` and ``weight_sum``.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0, "weight_sum": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            warm_up = min(1.0, (group["k"] + 1) / 5)
            weight = group["lr"] ** 2 * (group["k"] + 1)
            group["weight_sum"] += weight
            share = weight / group["weight_sum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "z" not in state:
                    state["z"] = parameter.detach().clone()
                state["z"].sub_(parameter.grad, alpha=group["lr"] * warm_up)
                parameter.lerp_(state["z"], share)
            group["k"] += 1
        return loss
