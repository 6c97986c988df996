"""Local SGD equals its recursion over replicas in one process."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dist import DDPStrategy
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_trainer,
    share_of,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool
from tests.integration.ddp.local_steps import Teacher, difference, local_steps

NUM_SAMPLES = 96


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.model(batch[0]), batch[1]))
        optimizer.step()


def fit(
    sync_every: int,
    warmup: int,
    validate_every: int | None,
    kind: type[Classifier] = Classifier,
    static_graph: bool = False,
) -> Any:
    module = make_module(kind)
    validated: list[dict[str, Tensor]] = []
    module.on_validation_start = lambda: validated.append(state_of(module))
    trainer = make_trainer(
        devices=2,
        strategy=DDPStrategy(
            sync_every=sync_every, sync_warmup_steps=warmup, static_graph=static_graph
        ),
        val_check_interval=validate_every,
        limit_val_batches=1 if validate_every else 0,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, share_of(int(os.environ["RANK"]), NUM_SAMPLES), make_loader(8))
    return state_of(module), validated


@torch.no_grad()
def average(modules: list[Any]) -> None:
    for same in zip(*(m.parameters() for m in modules), strict=True):
        mean = sum(same) / len(same)
        for parameter in same:
            parameter.copy_(mean)


def recursion(sync_every: int, warmup: int, validate_every: int | None) -> dict[str, Tensor]:
    local, modules = 0, []
    for step, modules in local_steps(NUM_SAMPLES, warmup):
        local += step >= warmup
        if local == sync_every or (validate_every and (step + 1) % validate_every == 0):
            average(modules)
            local = 0
    average(modules)
    return state_of(modules[0])


@pytest.mark.some("2-0-None")
@pytest.mark.parametrize(
    ("sync_every", "warmup", "validate_every"),
    [(2, 0, None), (5, 0, None), (5, 3, None), (5, 3, 4), (100, 4, None)],
)
def test_equals_the_recursion(
    workers: WorkerPool, sync_every: int, warmup: int, validate_every: int | None
) -> None:
    expected = recursion(sync_every, warmup, validate_every)
    (first, seen), (second, also_seen) = workers.run(2, fit, sync_every, warmup, validate_every)
    for name, value in expected.items():
        assert float((first[name] - value).abs().max()) < 1e-12, name
        assert torch.equal(first[name], second[name])
    for one, other in zip(seen, also_seen, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize(("kind", "static_graph"), [(Manual, False), (Classifier, True)])
def test_local_steps_of_other_kinds(
    workers: WorkerPool, kind: type[Classifier], static_graph: bool, warmup: int
) -> None:
    """Those of manual optimization, and of a graph that is learned when first they exchange."""
    expected = recursion(5, warmup, None)
    for state, _ in workers.run(2, fit, 5, warmup, None, kind, static_graph):
        assert all(float((state[n] - v).abs().max()) < 1e-12 for n, v in expected.items())


def test_frozen_parameters_that_hooks_write_are_averaged(workers: WorkerPool) -> None:
    for step, modules in local_steps(NUM_SAMPLES, 0, Teacher):
        if (step + 1) % 5 == 0:
            average(modules)
        for module in modules:
            module.follow()
    assert difference(*map(state_of, modules)) > 1e-3
    average(modules)
    for state, _ in workers.run(2, fit, 5, 0, None, Teacher):
        assert difference(state, state_of(modules[0])) < 1e-12


class Writing(Classifier):
    """Has a hook that writes something else on each replica, behind the last average, too."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        self.register_buffer("buffer", torch.zeros(1))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for tensor in (self.frozen.data, self.buffer):
            tensor.fill_(batch_idx + self.trainer.global_rank)


def fit_writing(sync_every: int) -> tuple[float, float]:
    module = make_module(Writing)
    trainer = make_trainer(devices=2, strategy=DDPStrategy(sync_every=sync_every))
    trainer.fit(module, share_of(int(os.environ["RANK"]), NUM_SAMPLES), make_loader(8))
    return module.frozen.item(), module.buffer.item()


@pytest.mark.parametrize("sync_every", [4, 5])
def test_what_hooks_write_behind_an_average_is_averaged(
    workers: WorkerPool, sync_every: int
) -> None:
    assert workers.run(2, fit_writing, sync_every) == [(11.5, 11.5)] * 2


def test_the_recursion_tells_how_often() -> None:
    often, seldom = recursion(2, 0, None), recursion(5, 0, None)
    assert any(float((often[n] - seldom[n]).abs().max()) > 1e-6 for n in often)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sync_every": 0}, "sync_every=0"),
        ({"sync_warmup_steps": -1}, "sync_warmup_steps=-1"),
        ({"sync_every": 4, "compression": "fp16"}, "nothing to compress"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DDPStrategy(**arguments)
