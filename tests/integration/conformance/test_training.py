"""Six steps under each strategy equal six steps on one device, in float64.

The strategies' optimizers update by groups, as on a GPU, and one device's one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor

from lightning_dist.engine.tensors.dtensor import whole
from tests.helpers.networks.chosen import chosen
from tests.helpers.networks.foreach import foreach_by_default
from tests.helpers.networks.models import make_module, state_of
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import (
    TOLERANCE,
    Synced,
    assert_close,
    joined,
    loaders_of,
    trainer_of,
)
from tests.integration.conformance.strategies import ENTRIES

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate_grad_batches": 2},
    "clip norm": {"gradient_clip_val": 0.05},
    "clip value": {"gradient_clip_val": 0.005, "gradient_clip_algorithm": "value"},
    "accumulate and clip": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    "accumulate later": {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]},
    "accumulate and skip": {"accumulate_grad_batches": 2, "max_epochs": 3, "skips": True},
}


def fit(name: str | None, optimizer: str, options: dict[str, Any]) -> Any:
    module = make_module(Synced, optimizer=optimizer, schedule_lr=True)
    kept: dict[str, list[Tensor]] = {}
    given = deepcopy(options)  # callbacks keep their trainer
    if given.pop("skips", False):  # the second epoch ends behind a batch whose update never comes
        module.on_train_batch_start = lambda _, index: -(module.current_epoch == 1 and index == 1)
    trainer, entry = trainer_of(name, **{"max_epochs": 2, **given})

    def keep_gradients(*_: Any) -> None:
        for n, p in module.named_parameters():
            if p.grad is not None:
                kept.setdefault(n, []).append(p.grad.clone())

    module.on_before_optimizer_step = keep_gradients
    trainer.fit(module, *loaders_of(trainer, entry))
    gradients = {n: torch.stack(list(map(whole, of_steps))) for n, of_steps in kept.items()}
    metrics = {n: float(v) for n, v in trainer.callback_metrics.items()}
    return state_of(module), gradients, metrics, trainer.global_step


# Each strategy with all options on two processes, and with the telling ones on four.
WHOLE = ("pipeline-gpipe-2", "ddp-2", "fsdp-2")
SOME = (("plain", "sgd"), ("accumulate", "adamw"), ("accumulate and clip", "sgd"))
LATER = ("pipeline-gpipe-2", "ddp-2", "ddp-2-static", "fsdp-2", "fsdp-2-microsteps")
CASES = [
    (name, options, optimizer)
    for name in ENTRIES
    for options in OPTIONS
    for optimizer in ("sgd", "adamw")
    if options not in ("accumulate later", "accumulate and skip")
    and (name in WHOLE or (options, optimizer) in SOME)
]
CASES = [c for c in CASES if "clip" not in c[1] or not ENTRIES[c[0]].averages_behind_hooks]
CASES += [(name, "clip value", "sgd") for name in ENTRIES if "tp-2" in name]
CASES += [(name, "accumulate later", "adamw") for name in (*LATER, "pipeline-2x2")]
CASES += [(name, "accumulate and skip", "sgd") for name in ENTRIES]


def fit_each(name: str, dials: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    with foreach_by_default():
        return {(o, optimizer): fit(name, optimizer, OPTIONS[o]) for o, optimizer in dials}


single_device = cache(lambda options, optimizer: fit(None, optimizer, OPTIONS[options]))


@pytest.fixture(scope="module")
def fitted(
    request: pytest.FixtureRequest, workers: WorkerPool
) -> Callable[[str], list[dict[tuple[str, str], Any]]]:
    """Gives what each rank has of a strategy's cases, which run in one go: torch learns once."""

    @cache
    def run(name: str) -> list[dict[tuple[str, str], Any]]:
        names, options, optimizers = (
            chosen(request.session, "fitted", parameter, request.path)
            for parameter in ("name", "options", "optimizer")
        )
        cells = zip(names, options, optimizers, strict=True)
        dials = [(option, optimizer) for entry, option, optimizer in cells if entry == name]
        return workers.run(ENTRIES[name].devices, fit_each, name, dials, timeout=120.0)

    return run


@pytest.mark.some(
    "pipeline-gpipe-2-*",
    "fsdp-2-plain-sgd",
    "fsdp-2-acc*clip-sgd",
    "fsdp-2-accumulate-adamw",
    "fsdp-2-acc*skip-sgd",
    "tp-2-*",
    "server-2-accumulate-adamw",
    "pp-2-shard-2-[pac]*",
)
@pytest.mark.parametrize(("name", "options", "optimizer"), CASES)
def test_equals_a_single_device(
    fitted: Callable[[str], list[dict[tuple[str, str], Any]]],
    name: str,
    options: str,
    optimizer: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    state, gradients, metrics, steps = single_device(options, optimizer)
    ranks = [of_rank[options, optimizer] for of_rank in fitted(name)]
    assert {rank[3] for rank in ranks} == {steps}
    for rank in ranks:
        assert rank[2] == ranks[0][2], "each rank must know the same numbers"
    assert ranks[0][2] == pytest.approx(metrics, abs=TOLERANCE)
    assert_close(joined([rank[0] for rank in ranks]), state)
    if ENTRIES[name].averages_behind_hooks:
        means = {n: sum(rank[1][n] for rank in ranks) / len(ranks) for n in gradients}
        assert_close(means, gradients)
    else:
        assert_close(joined([rank[1] for rank in ranks]), gradients)


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    one, other = (fit(None, "sgd", OPTIONS[name])[0] for name in ("plain", "clip norm"))
    with pytest.raises(AssertionError):
        assert_close(one, other)
