"""DiLoCo equals its recursion over replicas in one process, with torch's SGD as outer optimizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dist import DDPStrategy, OuterOptimizer
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_trainer,
    share_of,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool
from tests.integration.ddp.local_steps import local_steps

NUM_SAMPLES = 96
NUM_STEPS = NUM_SAMPLES // 2 // 4
INNER_LR = 0.05
DILOCO = OuterOptimizer()
PLAIN = OuterOptimizer(lr=0.5, momentum=0.0, nesterov=False)
HEAVY = OuterOptimizer(lr=0.7, momentum=0.8, nesterov=False)
MEAN = OuterOptimizer(lr=1.0, momentum=0.0, nesterov=False)


class PlainSGD(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=INNER_LR)


def fit(
    sync_every: int,
    outer: OuterOptimizer | None,
    warmup: int = 0,
    kind: type[Classifier] = Classifier,
    epochs: int = 1,
    resume: str | None = None,
    save: str | None = None,
) -> dict[str, Tensor]:
    module = make_module(kind)
    strategy = DDPStrategy(sync_every=sync_every, sync_warmup_steps=warmup, outer=outer)
    trainer = make_trainer(devices=2, strategy=strategy, max_epochs=epochs, limit_val_batches=0)
    own = share_of(int(os.environ["RANK"]), NUM_SAMPLES)
    trainer.fit(module, own, make_loader(8), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return state_of(module)


def recursion(sync_every: int, outer: OuterOptimizer, warmup: int) -> dict[str, Tensor]:
    weights = make_module()
    options: dict[str, Any] = {"momentum": outer.momentum, "nesterov": outer.nesterov}
    outer_sgd = torch.optim.SGD(weights.parameters(), lr=outer.lr, **options)
    local = 0
    for step, modules in local_steps(NUM_SAMPLES, warmup):
        if step < warmup:
            weights.load_state_dict(modules[0].state_dict())
            continue
        local += 1
        if local == sync_every or step == NUM_STEPS - 1:
            local = 0
            for parameter, *same in zip(
                weights.parameters(), *(m.parameters() for m in modules), strict=True
            ):
                parameter.grad = parameter.detach() - sum(p.detach() for p in same) / 2
            outer_sgd.step()
            for module in modules:
                module.load_state_dict(weights.state_dict())
    return state_of(weights)


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.some("3-outer0-0", "5-outer0-2", "1-outer2-0")
@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("outer", [DILOCO, PLAIN, HEAVY])
@pytest.mark.parametrize("sync_every", [1, 3, 5])
def test_equals_the_recursion(
    workers: WorkerPool, sync_every: int, outer: OuterOptimizer, warmup: int
) -> None:
    expected = recursion(sync_every, outer, warmup)
    first, second = workers.run(2, fit, sync_every, outer, warmup)
    assert difference(first, expected) < 1e-12
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_recursions_differ() -> None:
    one, *others = (recursion(3, outer, 0) for outer in (DILOCO, PLAIN, HEAVY, MEAN))
    assert min(difference(one, other) for other in others) > 1e-6


def test_a_rate_of_1_without_momentum_takes_the_mean_to_the_last_bit(workers: WorkerPool) -> None:
    (one, _), (other, _) = (workers.run(2, fit, 3, outer) for outer in (None, MEAN))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_rounds_of_one_sgd_step_are_nesterov_steps_on_the_mean_gradient(
    workers: WorkerPool,
) -> None:
    found, _ = workers.run(2, fit, 1, DILOCO, 0, PlainSGD)
    module = make_module()
    options: dict[str, Any] = {"momentum": DILOCO.momentum, "nesterov": True}
    optimizer = torch.optim.SGD(module.parameters(), lr=DILOCO.lr * INNER_LR, **options)
    for batches in zip(*(share_of(r, NUM_SAMPLES) for r in range(2)), strict=True):
        optimizer.zero_grad()
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        F.cross_entropy(module.model(x), y).backward()
        optimizer.step()
    assert difference(found, state_of(module)) < 1e-12


def test_the_momentum_is_resumed(workers: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    whole, _ = workers.run(2, fit, 3, DILOCO, 0, PlainSGD, 2)
    half, _ = workers.run(2, fit, 3, DILOCO, 0, PlainSGD, 1, None, path)
    resumed, _ = workers.run(2, fit, 3, DILOCO, 0, PlainSGD, 2, path)
    assert difference(half, whole) > 1e-6
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, r"lr=0\.0"),
        ({"momentum": 1.0}, r"momentum=1\.0"),
        ({"momentum": 0.0}, "needs a momentum"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OuterOptimizer(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compression": "fp16"}, "nothing to compress"),
        ({"uneven_inputs": True}, "uneven_inputs=True does not go with"),
    ],
)
def test_what_does_not_go_with_it(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DDPStrategy(outer=DILOCO, **arguments)
