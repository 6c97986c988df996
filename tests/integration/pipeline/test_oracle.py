"""Asynchronous training equals a sequential loop over minibatches, to the last bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_dist import PipelineStrategy
from lightning_dist.pipeline.partition import uniform_partition
from tests.helpers.models import (
    make_data,
    make_loader,
    make_module,
    make_optimizer,
    make_trainer,
    state_of,
)
from tests.helpers.oracle import Foresee, train_sequentially
from tests.helpers.workers import WorkerPool

EPOCHS = 3
LR_DECAY = 0.9


def fit(num_stages: int, versions: str, optimizer: str, drains: bool, scheduled: bool) -> Any:
    module = make_module(optimizer=optimizer, schedule_lr=scheduled)
    strategy = PipelineStrategy(schedule="pipedream", weight_versions=versions, partition="uniform")
    trainer = make_trainer(
        devices=num_stages,
        strategy=strategy,
        max_epochs=EPOCHS,
        limit_val_batches=1 if drains else 0,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, make_loader(), make_loader())
    return state_of(module), float(trainer.callback_metrics["train_loss_epoch"])


def oracle(
    num_stages: int,
    versions: str,
    optimizer: str,
    drains: bool,
    scheduled: bool,
    num_samples: int = 46,
    rate_factor: Callable[[int, int], float] = lambda stage, b: 1.0,
    foresee: Foresee | None = None,
) -> tuple[dict[str, Tensor], list[float]]:
    model = make_module().model
    layers = list(copy.deepcopy(model))
    stages = []
    for count in uniform_partition(len(layers), num_stages):
        stages.append(nn.Sequential(*layers[:count]))
        layers = layers[count:]
    optimizers = [make_optimizer(optimizer, stage.parameters()) for stage in stages]
    base = optimizers[0].param_groups[0]["lr"]

    def set_lr(b: int) -> None:
        for stage, opt in enumerate(optimizers):
            rate = base * LR_DECAY**b if scheduled else base
            opt.param_groups[0]["lr"] = rate * rate_factor(stage, b)

    batches = [batch for _ in range(EPOCHS) for batch in make_loader(num_samples)]
    epoch = len(batches) // EPOCHS
    losses = train_sequentially(
        stages,
        optimizers,
        batches,
        F.cross_entropy,
        drains=range(0, len(batches), epoch) if drains else (),
        weight_versions=versions,
        before_step=set_lr,
        foresee=foresee,
    )
    flat = nn.Sequential(*(layer for stage in stages for layer in stage))
    return {f"model.{n}": p.detach() for n, p in flat.named_parameters()}, losses[-epoch:]


def largest_difference(actual: list[Any], expected: dict[str, Tensor]) -> float:
    states: dict[str, Tensor] = {}
    for state, _ in actual:
        states.update(state)
    assert states.keys() == expected.keys()
    return max(float((states[n] - expected[n]).abs().max()) for n in expected)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("versions", ["stash", "vertical_sync", "none"])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_equals_the_oracle_over_drains(
    workers: WorkerPool, num_stages: int, versions: str, optimizer: str
) -> None:
    case = (num_stages, versions, optimizer, True, False)
    actual = workers.run(num_stages, fit, *case)
    expected, losses = oracle(*case)
    assert largest_difference(actual, expected) < 1e-12
    sizes = [8, 8, 8, 8, 8, 6]
    mean = sum(size * loss for size, loss in zip(sizes, losses, strict=True)) / sum(sizes)
    assert [logged for _, logged in actual] == pytest.approx([mean] * num_stages, abs=1e-12)


def test_is_not_flushed_between_epochs(workers: WorkerPool) -> None:
    case = (3, "stash", "sgd", False, False)
    actual = workers.run(3, fit, *case)
    assert largest_difference(actual, oracle(*case)[0]) < 1e-12
    assert largest_difference(actual, oracle(3, "stash", "sgd", True, False)[0]) > 1e-6


CORRECTION_STEPS = 9


def fit_corrected(num_stages: int, versions: str) -> Any:
    module = make_module(schedule_lr=True)
    strategy = PipelineStrategy(
        schedule="pipedream",
        partition="uniform",
        weight_versions=versions,
        staleness_correction="lr",
        correction_steps=CORRECTION_STEPS,
    )
    trainer = make_trainer(
        devices=num_stages,
        strategy=strategy,
        max_epochs=EPOCHS,
        limit_val_batches=1,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, make_loader(), make_loader())
    return state_of(module), 0.0


@pytest.mark.parametrize("versions", ["stash", "vertical_sync"])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_stale_stages_begin_with_smaller_rates(
    workers: WorkerPool, num_stages: int, versions: str
) -> None:
    actual = workers.run(num_stages, fit_corrected, num_stages, versions)
    last = num_stages - 1

    def factor(stage: int, b: int) -> float:
        staleness = last if versions == "vertical_sync" else last - stage
        return max(1, staleness) ** (min(b / CORRECTION_STEPS, 1.0) - 1.0)

    expected, _ = oracle(num_stages, versions, "sgd", True, True, rate_factor=factor)
    assert largest_difference(actual, expected) < 1e-12
    plain, _ = oracle(num_stages, versions, "sgd", True, True)
    assert (largest_difference(actual, plain) > 1e-6) == (num_stages > 2)


def foresee(stage: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[int], Any]:
    (group,) = optimizer.param_groups
    weights = {n: p.detach().clone() for n, p in stage.named_parameters()}
    states = {n: copy.deepcopy(optimizer.state.get(p, {})) for n, p in stage.named_parameters()}

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


def fit_predicting(num_stages: int, optimizer: str) -> Any:
    module = make_module(optimizer=optimizer)
    strategy = PipelineStrategy(
        schedule="pipedream", partition="uniform", staleness_correction="predict"
    )
    trainer = make_trainer(
        devices=num_stages,
        strategy=strategy,
        max_epochs=EPOCHS,
        limit_val_batches=1,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, make_loader(), make_loader())
    return state_of(module), strategy.peak_stash_bytes


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_forwards_see_where_the_optimizer_goes(
    workers: WorkerPool, num_stages: int, optimizer: str
) -> None:
    actual = workers.run(num_stages, fit_predicting, num_stages, optimizer)
    expected, _ = oracle(num_stages, "stash", optimizer, True, False, foresee=foresee)
    assert largest_difference(actual, expected) < 1e-12
    plain, _ = oracle(num_stages, "stash", optimizer, True, False)
    assert largest_difference(actual, plain) > 1e-6
    for stage, (state, stashes) in enumerate(actual):
        own = sum(value.nbytes for value in state.values())
        assert stashes[stage] == (num_stages - stage) * own * (stage < num_stages - 1)


def test_update_b_uses_the_learning_rate_of_step_b(workers: WorkerPool) -> None:
    case = (3, "stash", "sgd", True, True)
    actual = workers.run(3, fit, *case)
    assert largest_difference(actual, oracle(*case)[0]) < 1e-12


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_the_oracle_tells_the_versions_apart(num_stages: int) -> None:
    stash, vertical, none = (
        oracle(num_stages, versions, "sgd", True, False)[0]
        for versions in ("stash", "vertical_sync", "none")
    )
    for one, other in ((stash, none), (stash, vertical), (vertical, none)):
        assert max(float((one[n] - other[n]).abs().max()) for n in stash) > 1e-6


def fit_replicas() -> Any:
    module = make_module()
    strategy = PipelineStrategy(schedule="pipedream", num_stages=2, partition="uniform")
    trainer = make_trainer(
        devices=4, strategy=strategy, max_epochs=EPOCHS, limit_val_batches=1, num_sanity_val_steps=0
    )
    data = make_data(48)
    sampler = DistributedSampler(data, shuffle=False, **strategy.distributed_sampler_kwargs)
    trainer.fit(module, DataLoader(data, batch_size=4, sampler=sampler), make_loader(8))
    return state_of(module), 0.0


def test_two_replicas_of_two_stages_equal_the_oracle(workers: WorkerPool) -> None:
    actual = workers.run(4, fit_replicas)
    expected, _ = oracle(2, "stash", "sgd", True, False, num_samples=48)
    assert largest_difference(actual, expected) < 1e-12
    for first, second in ((0, 1), (2, 3)):
        left, right = actual[first][0], actual[second][0]
        assert all(torch.equal(left[name], right[name]) for name in left)
