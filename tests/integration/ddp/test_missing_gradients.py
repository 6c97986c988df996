"""Ranks that use other parameters in a step than each other train as a single device does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.nn.functional as F
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_dist import DDPStrategy, FSDPStrategy
from tests.helpers.networks.models import (
    Classifier,
    make_layers,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool

NONE = -1
Plan = tuple[tuple[int, ...], tuple[int, ...]]


class Choosing(Classifier):
    """Sends each half of a batch through an expert of its own, or through none.

    Args:
        plan: For each half its experts, batch by batch, and again from the start.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__("adamw")
        self.plan = plan
        self.model = make_layers(3)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(1 + max(map(max, plan))))
        self.experts.append(nn.Linear(6, 6))  # for the data of any half
        self.fixed = nn.Linear(2, 2).requires_grad_(False)

    def _loss(self, half: int, batch_idx: int, x: Tensor, y: Tensor) -> Tensor:
        chosen = self.plan[half][batch_idx % len(self.plan[half])]
        if chosen != NONE:
            x = self.experts[chosen](x)
        # Behind the first block and ahead of the last: what it takes is differentiable or not.
        return F.cross_entropy(self.model[1:](self.experts[-1](self.model[0](x))), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        trainer = self.trainer
        halves = [0, 1] if trainer.world_size == 1 else [trainer.global_rank]
        losses = [self._loss(h, batch_idx, *(t[4 * h : 4 * h + 4] for t in batch)) for h in halves]
        loss: Tensor = sum(losses) / len(losses)
        return loss


class Zeroing(Choosing):
    """Keeps the memory of gradients."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


class Summing(Choosing):
    """Sums the gradients of two batches by itself."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        batch_idx, optimizer, closure = args[1:4]
        if batch_idx % 2 == 0:
            closure()
        else:
            optimizer.step(closure=closure)


def fit(
    plan: Plan,
    strategy: Callable[[], Strategy] | None,
    accumulate: int,
    module_class: type[Choosing] = Choosing,
) -> dict[str, Tensor]:
    module = make_module(module_class, plan=plan)
    trainer = make_trainer(
        devices=1 if strategy is None else 2,
        strategy="auto" if strategy is None else strategy(),
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.05,
    )
    trainer.fit(module, make_loader(48), make_loader(8))
    return state_of(module)


OWN: Plan = ((0,), (1,))
FIRST_ONLY: Plan = ((0,), (NONE,))
TURNS: Plan = ((0, NONE), (NONE, 0))
ONCE_AN_UPDATE: Plan = ((0, NONE), (NONE, NONE))
EVERY_OTHER_UPDATE: Plan = ((0, 0, NONE, NONE), (0, NONE, NONE, NONE))
DDP, FSDP = DDPStrategy, FSDPStrategy
CASES: dict[type[Strategy], list[tuple[Plan, Callable[[], Strategy], int]]] = {
    DDP: [
        (OWN, DDP, 1),
        (FIRST_ONLY, partial(DDP, bucket_megabytes=0.0005), 2),
        (ONCE_AN_UPDATE, DDP, 2),
    ],
    FSDP: [
        (OWN, FSDP, 1),
        (FIRST_ONLY, partial(FSDP, sync_every_microstep=True), 2),
        (TURNS, FSDP, 1),
        (ONCE_AN_UPDATE, partial(FSDP, find_unused_parameters=True), 1),
        (EVERY_OTHER_UPDATE, partial(FSDP, find_unused_parameters=True, shard="gradients"), 2),
        (
            EVERY_OTHER_UPDATE,
            partial(FSDP, find_unused_parameters=True, sync_every_microstep=True),
            2,
        ),
    ],
}
SENDS_ZEROS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
STRATEGIES = [
    DDP,
    pytest.param(
        FSDP, marks=pytest.mark.skipif(not SENDS_ZEROS, reason="FSDP2 sends zeros since torch 2.13")
    ),
]


def fit_all(strategy: type[Strategy]) -> list[dict[str, Tensor]]:
    return [fit(*case) for case in CASES[strategy]]


@pytest.mark.some("FSDPStrategy")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_a_rank_does_not_use_counts_as_zero(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch, strategy: type[Strategy]
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = workers.run(2, fit_all, strategy)
    for case, *states in zip(CASES[strategy], *ranks, strict=True):
        expected = fit(case[0], None, case[2])
        for state in states:
            for name, value in expected.items():
                assert float((state[name] - value).abs().max()) < 1e-12, (name, case)


KEEPING: list[tuple[type[Choosing], Plan]] = [
    (Zeroing, OWN),
    (Zeroing, ONCE_AN_UPDATE),
    (Summing, ONCE_AN_UPDATE),
]


def fit_keeping(strategy: Callable[[], Strategy] | None) -> list[dict[str, Tensor]]:
    return [fit(plan, strategy, 1, module_class) for module_class, plan in KEEPING]


@pytest.mark.some("FSDPStrategy")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_does_where_gradients_stay_from_step_to_step(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch, strategy: type[Strategy]
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = workers.run(2, fit_keeping, partial(strategy, find_unused_parameters=True))
    for case, single, *states in zip(KEEPING, fit_keeping(None), *ranks, strict=True):
        for state in states:
            for name, value in single.items():
                assert float((state[name] - value).abs().max()) < 1e-12, (name, case)


NOBODY: Plan = ((NONE,), (NONE,))
NOBODY_LATER: Plan = ((*[0] * 9, NONE, NONE), (*[NONE] * 9, NONE, NONE))


class Idle(Choosing):
    """Has a layer that nobody uses in the end, behind one that the second rank does not."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.experts.insert(0, nn.Linear(6, 6))


def refuse_all(strategy: type[Strategy], num_samples: int) -> list[tuple[str, int]]:
    answers = []
    for plan in (NOBODY, NOBODY_LATER):
        trainer = make_trainer(devices=2, strategy=strategy())
        module = make_module(Idle if plan == NOBODY else Choosing, plan=plan)
        with pytest.raises(ValueError, match="does not depend on") as caught:
            trainer.fit(module, make_loader(num_samples), make_loader(8))
        answers.append((str(caught.value), trainer.global_step))
    return answers


@pytest.mark.some("DDPStrategy-88")
@pytest.mark.parametrize("num_samples", [88, 80])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_no_rank_uses_is_named_on_each(
    workers: WorkerPool, strategy: type[Strategy], num_samples: int
) -> None:
    for answers in workers.run(2, refuse_all, strategy, num_samples):
        assert all("['experts.0.weight', 'experts.0.bias']." in text for text, _ in answers)
        assert [steps for _, steps in answers] == [0, 9]
