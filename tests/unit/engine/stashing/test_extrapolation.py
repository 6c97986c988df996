"""Where an optimizer is said to go, against where it goes."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.schedules.update_rule import StageWeights
from lightning_dist.engine.stashing.policy import choose_policy
from lightning_dist.engine.stashing.prediction import check_extrapolation, extrapolated

AHEAD = (1, 2, 5)


def trained(kind: type[torch.optim.Optimizer], **options: Any) -> tuple[nn.Parameter, Any]:
    generator = torch.Generator().manual_seed(4)
    weight = nn.Parameter(torch.randn(3, 2, generator=generator, dtype=torch.float64))
    optimizer = kind([weight], lr=0.1, **options)
    for _ in range(4):
        weight.grad = torch.randn(3, 2, generator=generator, dtype=torch.float64)
        optimizer.step()
    return weight, optimizer


def forecast(optimizer: Any, weight: nn.Parameter, num_updates: int) -> Tensor:
    found = extrapolated(optimizer, {"weight": weight}, num_updates)
    assert found.keys() == {"weight"}
    return found["weight"]


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_goes_where_it_goes_without_gradients(nesterov: bool) -> None:
    weight, optimizer = trained(torch.optim.SGD, momentum=0.9, nesterov=nesterov)
    seen = {count: forecast(optimizer, weight, count) for count in AHEAD}
    for count in range(1, max(AHEAD) + 1):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        if count in AHEAD:
            torch.testing.assert_close(seen[count], weight.detach(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_goes_on_as_by_its_last_averages(kind: Any, amsgrad: bool) -> None:
    weight, optimizer = trained(kind, weight_decay=0.0, amsgrad=amsgrad)
    before = copy.deepcopy(optimizer.state[weight])
    variance = before["max_exp_avg_sq" if amsgrad else "exp_avg_sq"] / (1 - 0.999**4)
    mean = before["exp_avg"] / (1 - 0.9**4)
    for count in AHEAD:
        expected = weight.detach() - 0.1 * count * mean / (variance.sqrt() + 1e-8)
        torch.testing.assert_close(forecast(optimizer, weight, count), expected, rtol=0, atol=1e-14)
    after = optimizer.state[weight]
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.NAdam])
def test_before_the_first_update_nothing_is_known(kind: Any) -> None:
    weight = nn.Parameter(torch.ones(2))
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind([weight], lr=0.1, **options)
    check_extrapolation(optimizer)
    assert torch.equal(forecast(optimizer, weight, 3), weight)


def test_without_momentum_nobody_knows() -> None:
    with pytest.raises(ValueError, match=r"does not know where SGD goes.*momentum"):
        check_extrapolation(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))


def test_a_thawed_parameter_is_foreseen_and_copied() -> None:
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    predict = partial(extrapolated, optimizer)
    policy = choose_policy(layer, StageWeights(), predict)
    policy.acquire()
    frozen = policy.acquire().aliases["bias"]
    assert frozen.data_ptr() == layer.bias.data_ptr(), "nobody writes to it"
    layer.bias.requires_grad_(True)
    thawed = policy.acquire().aliases["bias"]
    assert thawed.requires_grad
    assert thawed.data_ptr() != layer.bias.data_ptr()
