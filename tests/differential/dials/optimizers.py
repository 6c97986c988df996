"""The optimizers and schedulers that a case may name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tests.differential.case import Case
from tests.helpers.networks.schedule_free import ScheduleFree

Parameters = list[nn.Parameter]
NOT_DECAYED = "is_not_decayed"
"""A tag of parameters, as users put them on."""


class CountingTensor(torch.optim.SGD):
    """Counts its steps in a tensor of each group."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.05)
        for group in self.param_groups:
            group["step"] = torch.zeros(2)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        for group in self.param_groups:
            group["step"] += 1
        return result


class OneEstimate(torch.optim.SGD):
    """Trains at a rate that is an estimate from all gradients, as Prodigy and D-Adaptation do."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.05)
        for group in self.param_groups:
            group["d"] = 1e-4

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            size = sum(float(gradient.abs().sum()) for gradient in gradients)
            group["d"] = max(group["d"], 0.01 * size / (1.0 + size))
            group["lr"] = group["d"]
        super().step()
        return loss


def _two_groups(model: nn.Module, parameters: Parameters) -> Optimizer:
    decayed = [p for p in parameters if not getattr(p, NOT_DECAYED)]
    others = [p for p in parameters if getattr(p, NOT_DECAYED)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)


OPTIMIZERS: dict[str, Callable[[nn.Module, Parameters], Optimizer]] = {
    "sgd": lambda _, p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda _, p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda _, p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adagrad": lambda _, p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda _, p: torch.optim.RMSprop(p, lr=0.005, momentum=0.5, centered=True),
    "adamax": lambda _, p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda _, p: torch.optim.ASGD(p, lr=0.05),
    "rprop": lambda _, p: torch.optim.Rprop(p, lr=0.01),
    "radam": lambda _, p: torch.optim.RAdam(p, lr=0.01),
    "adadelta": lambda _, p: torch.optim.Adadelta(p, lr=0.5),
    "nadam": lambda _, p: torch.optim.NAdam(p, lr=0.01),
    "two_groups": _two_groups,
    "schedule_free": lambda _, p: ScheduleFree(p),
    "counting_tensor": lambda _, p: CountingTensor(p),
    "one_estimate": lambda _, p: OneEstimate(p),
}


def _schedule(name: str, optimizer: Optimizer, case: Case) -> dict[str, Any]:
    schedulers = torch.optim.lr_scheduler
    if name == "exponential_step":
        return {"scheduler": schedulers.ExponentialLR(optimizer, 0.9), "interval": "step"}
    if name == "every_second_step":
        warmup = schedulers.LinearLR(optimizer, 0.5, total_iters=3)
        then = schedulers.CosineAnnealingLR(optimizer, 6)
        both = schedulers.SequentialLR(optimizer, [warmup, then], [3])
        return {"scheduler": both, "interval": "step", "frequency": 2}
    if name == "step_epoch":
        return {"scheduler": schedulers.StepLR(optimizer, 1, 0.5), "interval": "epoch"}
    if name == "one_cycle":
        steps = case.num_batches * case.epochs + 1
        highest = [2 * group["lr"] for group in optimizer.param_groups]  # more, and some diverge
        one_cycle = schedulers.OneCycleLR(optimizer, highest, total_steps=steps)
        return {"scheduler": one_cycle, "interval": "step"}
    interval = "step" if name == "plateau_step" else "epoch"
    return {
        "scheduler": schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5),
        "interval": interval,
        "monitor": "train_loss" if interval == "step" else "val_loss",
    }


SCHEDULERS = (
    "exponential_step",
    "every_second_step",
    "step_epoch",
    "one_cycle",
    "plateau_step",
    "plateau_epoch",
)


def configure(model: nn.Module, case: Case, lr: float | None) -> Any:
    """Builds what ``configure_optimizers`` returns.

    Args:
        model: Whose parameters to train.
        case: Names the optimizer and the scheduler.
        lr: A rate that was found; None keeps the optimizer's own.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if case.stepping == "two_manual":
        halves = parameters[::2], parameters[1::2]
        return [OPTIMIZERS[case.optimizer](model, half) for half in halves]
    optimizer = OPTIMIZERS[case.optimizer](model, parameters)
    if lr is not None:
        for group in optimizer.param_groups:
            group["lr"] = lr
    configured: dict[str, Any] = {"optimizer": optimizer}
    if case.scheduler is not None:
        configured["lr_scheduler"] = _schedule(case.scheduler, optimizer, case)
    return configured
