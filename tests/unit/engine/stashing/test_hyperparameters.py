from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from lightning_dist.engine.stashing.learning_rates import HyperparameterHistory


def sgd(**options: object) -> Optimizer:
    return SGD([nn.Parameter(torch.ones(1))], **{"lr": 1.0, **options})  # type: ignore[arg-type]


def run_late(
    optimizer: Optimizer,
    num_batches: int,
    delay: int,
    change: Callable[[int], object],
    step: Callable[[], object],
) -> None:
    """Has users change groups after each batch, and a step for it some batches later."""
    history = HyperparameterHistory()
    for batch in range(num_batches + delay):
        if batch < num_batches:
            history.remember(optimizer)
        if batch >= delay:
            with history.of_next_update(optimizer):
                step()
            history.end_update()
        if batch < num_batches:
            change(batch)


def test_an_optimizer_without_a_rate_has_a_history_too() -> None:
    optimizer = sgd()
    optimizer.param_groups[0]["lr"] = None  # as one that finds its own has it
    history = HyperparameterHistory()
    history.remember(optimizer)
    with history.of_next_update(optimizer):
        assert optimizer.param_groups[0]["lr"] is None


def test_an_update_gets_the_learning_rate_of_its_batch() -> None:
    optimizer = sgd(momentum=0.5)
    group = optimizer.param_groups[0]
    history = HyperparameterHistory()
    for batch in range(3):
        group["lr"] = 1.0 / (batch + 1)
        history.remember(optimizer)
    with history.of_next_update(optimizer):
        assert group["lr"] == 1.0
        group["momentum"] = 0.9  # the optimizer's own change
    assert (group["lr"], group["momentum"]) == (1 / 3, 0.9)
    history.end_update()
    with history.of_next_update(optimizer):
        assert (group["lr"], group["momentum"]) == (1 / 2, 0.9)


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_step_counts_as_if_it_came_at_once(delay: int) -> None:
    optimizer = sgd()
    group = optimizer.param_groups[0]
    group["k"], group["weight_sum"] = 0, 0.0
    scheduler = ExponentialLR(optimizer, 0.5)
    optimizer.step()
    seen = []

    def step() -> None:
        group["weight_sum"] += group["lr"] * (group["k"] + 1)
        group["k"] += 1
        seen.append((group["lr"], group["k"]))

    run_late(optimizer, 20, delay, lambda _: scheduler.step(), step)
    assert seen == [(0.5**b, b + 1) for b in range(20)]
    assert group["k"] == 20
    assert group["weight_sum"] == sum(0.5**b * (b + 1) for b in range(20))
    assert group["lr"] == 0.5**20


@pytest.mark.parametrize("delay", [0, 2])
def test_groups_may_hold_tensors(delay: int) -> None:
    optimizer = sgd(lr=torch.tensor(1.0))
    group = optimizer.param_groups[0]
    rate, group["step"], group["scales"] = group["lr"], torch.zeros(2), (torch.ones(3), None)
    scheduler = ExponentialLR(optimizer, 0.5)  # writes into the rate
    optimizer.step()
    rates = []

    def step() -> None:
        group["step"] += 1
        rates.append(float(rate))

    run_late(optimizer, 5, delay, lambda _: scheduler.step(), step)
    assert rates == [0.5**b for b in range(5)]
    assert group["step"].tolist() == [5.0, 5.0]
    assert group["lr"] is rate


def test_what_a_step_wrote_gives_way_to_a_later_change() -> None:
    optimizer = sgd()
    group = optimizer.param_groups[0]
    seen = []

    def step() -> None:
        seen.append(group["lr"])
        group["lr"] = -1.0

    def change(batch: int) -> None:
        if batch == 2:
            group["lr"] = 7.0

    run_late(optimizer, 6, 1, change, step)
    assert seen == [1.0, -1.0, -1.0, 7.0, -1.0, -1.0]


def test_a_smaller_rate_is_seen_by_steps_alone() -> None:
    optimizer = sgd()
    group = optimizer.param_groups[0]
    factors = iter([0.25, 0.5])
    history = HyperparameterHistory(lambda: next(factors))
    history.remember(optimizer)
    history.remember(optimizer)
    for factor in (0.25, 0.5):
        with history.of_next_update(optimizer):
            assert group["lr"] == factor
        history.end_update()
        assert group["lr"] == 1.0


def test_an_update_refuses_groups_that_its_batch_did_not_know() -> None:
    optimizer = sgd()
    history = HyperparameterHistory()
    history.remember(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with (
        pytest.raises(ValueError, match="has 2 parameter groups, and had 1"),
        history.of_next_update(optimizer),
    ):
        pass
    history.end_update()
    history.remember(optimizer)
    with history.of_next_update(optimizer):
        pass


def test_values_that_nothing_changes_stay_the_same_objects() -> None:
    optimizer = sgd()
    before = copy.copy(optimizer.param_groups[0])
    run_late(optimizer, 3, 1, lambda _: None, lambda: None)
    assert all(value is before[key] for key, value in optimizer.param_groups[0].items())
