"""Asynchronous training equals a sequential loop over minibatches, to the last bits."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist import PipelineStrategy
from lightning_dist.engine.planning.partition import uniform_partition
from tests.helpers.networks.models import make_loader, make_module, make_optimizer, state_of
from tests.helpers.oracle import foresee_at, train_sequentially
from tests.helpers.processes.workers import WorkerPool
from tests.integration.pipeline.common import (
    EPOCHS,
    LR_DECAY,
    SIZES,
    Fitted,
    assert_replicas_agree,
    fit,
    fit_counting,
    fit_replicas,
    largest_difference,
    mean_of,
    trainer_of,
)

PIPEDREAM = {"schedule": "pipedream"}
CORRECTION_STEPS = 9


def oracle(
    num_stages: int,
    versions: str = "stash",
    optimizer: str = "sgd",
    *,
    drains: bool = True,
    scheduled: bool = False,
    num_samples: int = sum(SIZES),
    rate_factor: Callable[[int, int], float] = lambda stage, b: 1.0,
    predicts: bool = False,
) -> tuple[dict[str, Tensor], list[float]]:
    model = make_module().model
    layers = list(copy.deepcopy(model))
    stages = []
    for count in uniform_partition(len(layers), num_stages):
        stages.append(nn.Sequential(*layers[:count]))
        layers = layers[count:]
    optimizers = [make_optimizer(optimizer, stage.parameters()) for stage in stages]
    base = optimizers[0].param_groups[0]["lr"]

    def rate(b: int) -> float:
        return float(base * LR_DECAY**b) if scheduled else base

    def set_lr(b: int) -> None:
        for stage, opt in enumerate(optimizers):
            opt.param_groups[0]["lr"] = rate(b) * rate_factor(stage, b)

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
        foresee=foresee_at(rate) if predicts else None,
    )
    flat = nn.Sequential(*(layer for stage in stages for layer in stage))
    return {f"model.{n}": p.detach() for n, p in flat.named_parameters()}, losses[-epoch:]


@pytest.mark.some("2-stash-adamw", "3-vertical_sync-sgd", "4-none-adamw")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("versions", ["stash", "vertical_sync", "none"])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_equals_the_oracle_over_drains(
    workers: WorkerPool, num_stages: int, versions: str, optimizer: str
) -> None:
    strategy = {**PIPEDREAM, "weight_versions": versions}
    actual = workers.run(num_stages, fit, num_stages, strategy, {"optimizer": optimizer})
    expected, losses = oracle(num_stages, versions, optimizer)
    assert largest_difference(actual, expected) < 1e-12
    mean = mean_of(losses)
    assert [logged for _, logged in actual] == pytest.approx([mean] * num_stages, abs=1e-12)


def test_is_not_flushed_between_epochs(workers: WorkerPool) -> None:
    actual = workers.run(3, fit, 3, PIPEDREAM, {}, {"limit_val_batches": 0})
    assert largest_difference(actual, oracle(3, drains=False)[0]) < 1e-12
    assert largest_difference(actual, oracle(3)[0]) > 1e-6


@pytest.mark.some("2-stash")
@pytest.mark.parametrize("versions", ["stash", "vertical_sync"])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_stale_stages_begin_with_smaller_rates(
    workers: WorkerPool, num_stages: int, versions: str
) -> None:
    strategy = {
        **PIPEDREAM,
        "weight_versions": versions,
        "staleness_correction": "lr",
        "correction_steps": CORRECTION_STEPS,
    }
    actual = workers.run(num_stages, fit, num_stages, strategy, {"schedule_lr": True})
    last = num_stages - 1

    def factor(stage: int, b: int) -> float:
        staleness = last if versions == "vertical_sync" else last - stage
        return max(1, staleness) ** (min(b / CORRECTION_STEPS, 1.0) - 1.0)

    expected, _ = oracle(num_stages, versions, scheduled=True, rate_factor=factor)
    assert largest_difference(actual, expected) < 1e-12
    plain, _ = oracle(num_stages, versions, scheduled=True)
    assert (largest_difference(actual, plain) > 1e-6) == (num_stages > 2)


def fit_predicting(num_stages: int, optimizer: str) -> tuple[Fitted, tuple[int, ...]]:
    strategy = PipelineStrategy(
        schedule="pipedream", partition="uniform", staleness_correction="predict"
    )
    module = make_module(optimizer=optimizer, schedule_lr=True)
    trainer_of(num_stages, strategy, {}).fit(module, make_loader(), make_loader())
    return (state_of(module), 0.0), strategy.peak_stash_bytes


@pytest.mark.some("4-sgd")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_forwards_see_where_the_optimizer_goes(
    workers: WorkerPool, num_stages: int, optimizer: str
) -> None:
    ranks = workers.run(num_stages, fit_predicting, num_stages, optimizer)
    actual = [fitted for fitted, _ in ranks]
    expected, _ = oracle(num_stages, optimizer=optimizer, scheduled=True, predicts=True)
    assert largest_difference(actual, expected) < 1e-12
    plain, _ = oracle(num_stages, optimizer=optimizer, scheduled=True)
    assert largest_difference(actual, plain) > 1e-6
    for stage, ((state, _), stashes) in enumerate(ranks):
        own = sum(value.nbytes for value in state.values())
        assert stashes[stage] == (num_stages - stage) * own * (stage < num_stages - 1)


def test_update_b_uses_the_learning_rate_of_step_b(workers: WorkerPool) -> None:
    actual = workers.run(3, fit, 3, PIPEDREAM, {"schedule_lr": True})
    assert largest_difference(actual, oracle(3, scheduled=True)[0]) < 1e-12


@pytest.mark.some("3")
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_the_oracle_tells_the_versions_apart(num_stages: int) -> None:
    stash, vertical, none = (
        oracle(num_stages, versions)[0] for versions in ("stash", "vertical_sync", "none")
    )
    for one, other in ((stash, none), (stash, vertical), (vertical, none)):
        assert max(float((one[n] - other[n]).abs().max()) for n in stash) > 1e-6


def test_two_replicas_of_two_stages_equal_the_oracle(workers: WorkerPool) -> None:
    actual = workers.run(4, fit_replicas, PIPEDREAM, {})
    assert largest_difference(actual, oracle(2, num_samples=48)[0]) < 1e-12
    assert_replicas_agree(actual)


@pytest.mark.some("2-stash")
@pytest.mark.parametrize("versions", ["stash", "vertical_sync"])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_what_an_optimizer_counts_in_its_groups_is_not_rolled_back(
    workers: WorkerPool, num_stages: int, versions: str
) -> None:
    strategy = {**PIPEDREAM, "weight_versions": versions}
    actual = workers.run(num_stages, fit_counting, num_stages, strategy)
    expected, _ = oracle(num_stages, versions, "schedule_free", scheduled=True)
    assert largest_difference(actual, expected) < 1e-12
    assert [count for _, count in actual] == [EPOCHS * len(SIZES)] * num_stages
