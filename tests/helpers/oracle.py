"""What an asynchronous pipeline must compute, as plain loops over batches.

Timing does not enter. PipeDream: minibatch b meets version max(t0, b - W_s) of stage s, where t0 is
the last drain and W_s = n - 1 - s (n - 1 on all stages under vertical sync), and its gradient makes
version b + 1 of the newest one. 2BW: batch b meets version max(t0, b - 1) of the whole model. With
prediction it meets what that version is about to become by the updates until its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

Copy = Callable[[nn.Module], dict[str, Tensor]]
"""Gives what a version of a module computes with: leaves that its parameters' gradients are of."""

Foresee = Callable[[nn.Module, torch.optim.Optimizer], Callable[[int], dict[str, Tensor]]]
"""Looks at a stage and its optimizer; gives weights as they will be some updates later."""


def copy_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies the parameters as they are."""
    return {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}


def foresee(
    stage: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[int], dict[str, Tensor]]:
    """Follows the momentum of SGD, or Adam's, at the rate of the moment that looks ahead."""
    (group,) = optimizer.param_groups
    weights = {n: p.detach().clone() for n, p in stage.named_parameters()}
    states = {n: deepcopy(optimizer.state.get(p, {})) for n, p in stage.named_parameters()}

    def ahead(name: str, num_updates: int) -> Tensor:
        state, lr = states[name], group["lr"]
        if not state or num_updates == 0:
            return weights[name]
        if isinstance(optimizer, torch.optim.SGD):
            gamma = group["momentum"]
            length = (gamma - gamma ** (num_updates + 1)) / (1 - gamma)
            return weights[name] - lr * length * state["momentum_buffer"]
        beta1, beta2 = group["betas"]
        mean = state["exp_avg"] / (1 - beta1 ** float(state["step"]))
        variance = state["exp_avg_sq"] / (1 - beta2 ** float(state["step"]))
        return weights[name] - lr * num_updates * mean / (variance.sqrt() + group["eps"])

    return lambda count: {n: ahead(n, count).clone().requires_grad_() for n in weights}


def foresee_at(rate: Callable[[int], float]) -> Foresee:
    """Looks ahead at the rate of the next update."""
    versions: Counter[int] = Counter()

    def look(
        stage: nn.Module, optimizer: torch.optim.Optimizer
    ) -> Callable[[int], dict[str, Tensor]]:
        version, ahead = versions[id(stage)], foresee(stage, optimizer)
        versions[id(stage)] += 1

        def at(num_updates: int) -> dict[str, Tensor]:
            optimizer.param_groups[0]["lr"] = rate(version)
            return ahead(num_updates)

        return at

    return look


def train_sequentially(
    stages: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    batches: Sequence[tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
    drains: Collection[int],
    weight_versions: str,
    before_step: Callable[[int], Any] = lambda b: None,
    foresee: Foresee | None = None,
    copy: Copy = copy_of,
    step: Callable[[int, int], Any] | None = None,
) -> list[float]:
    """Trains the stages in place; drains come before the minibatches named.

    A step other than the optimizer's is given the stage and the minibatch.
    """
    sights = [[foresee(*pair)] for pair in zip(stages, optimizers, strict=True)] if foresee else []
    versions = [[copy(stage)] for stage in stages]
    last = len(stages) - 1
    staleness = [last if weight_versions == "vertical_sync" else last - s for s in range(last + 1)]
    drained, losses = 0, []
    for b, (x, y) in enumerate(batches):
        drained = b if b in drains else drained
        used = [v[max(drained, b - staleness[s])] for s, v in enumerate(versions)]
        for s, of_versions in enumerate(sights):
            version = max(drained, b - staleness[s])
            used[s] = of_versions[version](b - version)
        inputs = [x]
        for stage, weights in zip(stages, used, strict=True):
            inputs.append(torch.func.functional_call(stage, weights, inputs[-1]).detach())
        losses.append(float(loss(inputs.pop(), y)))
        gradient = None
        for s in reversed(range(len(stages))):
            weights = versions[s][b] if weight_versions == "none" else used[s]
            h = inputs[s].requires_grad_(inputs[s].is_floating_point())
            out = torch.func.functional_call(stages[s], weights, h)
            root = loss(out, y) if s == last else out
            sources = [h, *weights.values()] if h.requires_grad else list(weights.values())
            results = list(torch.autograd.grad(root, sources, gradient))
            gradient = results.pop(0) if h.requires_grad else None
            for parameter, g in zip(stages[s].parameters(), results, strict=True):
                parameter.grad = g.to(parameter.dtype)
            before_step(b)
            optimizers[s].step() if step is None else step(s, b)
            versions[s].append(copy(stages[s]))
            if foresee is not None:
                sights[s].append(foresee(stages[s], optimizers[s]))
    return losses


def train_late(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Any, Any]],
    loss: Callable[[Any, Any], Tensor],
    drains: Collection[int],
    before_step: Callable[[int], Any] = lambda b: None,
    staleness: Callable[[str], int] = lambda name: 1,
    copy: Copy = copy_of,
    step: Callable[[int], Any] | None = None,
    foresee: Foresee | None = None,
) -> list[float]:
    """Trains a model in place; drains come before the batches named.

    The whole model's gradient is taken at weights of which each has its own age. With one update
    for all that is 2BW, with more of them for earlier stages PipeDream with stashed weights.
    Who looks ahead gives all weights the same age.
    """
    versions = [copy(model)]
    sights = [] if foresee is None else [foresee(model, optimizer)]
    drained, losses = 0, []
    for b, (x, y) in enumerate(batches):
        drained = b if b in drains else drained
        weights = {n: versions[max(drained, b - staleness(n))][n] for n in versions[0]}
        if sights:
            version = max(drained, b - 1)
            weights = sights[version](b - version)
        result = loss(torch.func.functional_call(model, weights, x), y)
        losses.append(float(result.detach()))
        own = dict(model.named_parameters())
        trained = [name for name in weights if own[name].requires_grad]
        gradients = torch.autograd.grad(result, [weights[name] for name in trained])
        for name, gradient in zip(trained, gradients, strict=True):
            own[name].grad = gradient.to(own[name].dtype)
        before_step(b)
        optimizer.step() if step is None else step(b)
        versions.append(copy(model))
        if foresee is not None:
            sights.append(foresee(model, optimizer))
    return losses
