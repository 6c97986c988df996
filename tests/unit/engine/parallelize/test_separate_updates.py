"""Optimizers whose updates need all parameters, told by a trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

from lightning_dist.engine.parallelize.separate_updates import check_separate_updates
from tests.helpers.networks.schedule_free import ScheduleFree


class Normed(SGD):
    """Divides by the norm of all gradients, as LAMB does."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        super().step()
        return loss


class NormedEach(SGD):
    """Divides each gradient by its own norm, and looks for the closure's loss."""

    def step(self, closure: Any) -> Any:
        loss = float(closure())
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None:
                parameter.grad.div_(parameter.grad.norm() * loss)
        return super().step()


class Slow(Optimizer):
    """Keeps copies, in lists or by parameter, and draws numbers."""

    def __init__(self, parameters: Any, keep: Callable[[Any], Any]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.copies = [keep(group["params"]) for group in self.param_groups]

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn_like(parameter) + parameter.grad, alpha=0.1)


class Perturbed(Optimizer):
    """Takes the gradient at a place that the norm of all gradients says, as SAM does."""

    def __init__(self, parameters: Any) -> None:
        self.inner = SGD(parameters, lr=0.1)
        super().__init__(self.inner.param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        with torch.enable_grad():
            closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        moves = [parameter.grad / norm for parameter in parameters]
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.add_(move)
        with torch.enable_grad():
            loss = closure()
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.sub_(move)
        self.inner.step()
        return loss


class Around(Optimizer):
    """Leaves the update to another optimizer."""

    def __init__(self, parameters: Any) -> None:
        self.inner = SGD(parameters, lr=0.1)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Fussy(SGD):
    """Cannot be tried."""

    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("Not now.")


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(part.parameters())} for part in model.children()]


def by_list(parameters: Any) -> list[Tensor]:
    return [p.detach().clone() for p in parameters]


def by_parameter(parameters: Any) -> dict[Tensor, Tensor]:
    return {p: p.detach().clone() for p in parameters}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: Normed(groups(model)), r"Normed updates a parameter by .* of others too"),
        (lambda model: Normed(model.parameters()), r"a stage has its own gradients only"),
        (lambda model: Slow(groups(model), by_list), r"'copies'\. A stage .* `self\.state\[p\]`"),
        (lambda model: Perturbed(model.parameters()), r"Perturbed updates .* of others too"),
        (lambda model: Around(model.parameters()), None),
        (lambda model: Slow(groups(model), by_parameter), None),
        (lambda model: NormedEach(groups(model)), None),
        (lambda model: ScheduleFree(model.parameters()), None),
        (lambda model: Fussy(model.parameters()), None),
        (lambda model: SGD(model.parameters(), momentum=0.9), None),
    ],
)
def test_an_update_that_needs_all_parameters_is_refused(
    make: Callable[[nn.Module], Optimizer], message: str | None
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    before, drawn = [p.clone() for p in model.parameters()], torch.get_rng_state()
    optimizer = make(model)
    StepLR(optimizer, 1)  # which replaces the object's `step`
    if message is None:
        check_separate_updates(optimizer, "stage")
    else:
        with pytest.raises(ValueError, match=message):
            check_separate_updates(optimizer, "stage")
    assert all(map(torch.equal, model.parameters(), before))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not optimizer.state
