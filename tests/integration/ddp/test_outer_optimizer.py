"""DiLoCo equals its recursion over replicas in one process, with torch's SGD as outer optimizer."""

from __future__ import annotations

import itertools
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_dist import DDPStrategy, OuterOptimizer
from lightning_dist.engine.comms.failures.peer_failure import RankFailedError
from lightning_dist.engine.data_parallel.local_config import LocalConfig
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_trainer,
    share_of,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool
from tests.integration.ddp.local_steps import (
    NUM_SAMPLES,
    StreamingOracle,
    difference,
    recursion,
)

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
    streaming: dict[str, Any] | None = None,
) -> dict[str, Tensor]:
    module = make_module(kind)
    strategy = DDPStrategy(
        sync_every=sync_every, sync_warmup_steps=warmup, outer=outer, **(streaming or {})
    )
    trainer = make_trainer(devices=2, strategy=strategy, max_epochs=epochs, limit_val_batches=0)
    own = share_of(int(os.environ["RANK"]), NUM_SAMPLES)
    trainer.fit(module, own, make_loader(8), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return state_of(module)


STREAMING: list[dict[str, Any]] = [
    {"fragments": 3},
    {"delay": 2},
    {"alpha": 0.25},
    {"fragments": 2, "delay": 1, "alpha": 0.5},
    {"fragments": 4, "delay": 3},
    {"wire": "bf16"},
    {"fragments": 2, "delay": 2, "alpha": 0.5, "wire": "bf16"},
]


@pytest.mark.some("streaming3-4", "streaming6-5")
@pytest.mark.parametrize("sync_every", [4, 5])
@pytest.mark.parametrize("streaming", STREAMING)
def test_streaming_equals_its_oracle(
    workers: WorkerPool, streaming: dict[str, Any], sync_every: int
) -> None:
    expected = StreamingOracle(LocalConfig(sync_every, outer=DILOCO, **streaming)).train()
    found = workers.run(
        2, fit, sync_every, DILOCO, 0, Classifier, 1, None, None, streaming, timeout=60.0
    )
    for state in found:
        assert difference(state, expected) < 1e-12


@pytest.mark.long
def test_the_oracles_differ() -> None:
    plain = recursion(4, DILOCO, 0)
    assert difference(StreamingOracle(LocalConfig(4, outer=DILOCO)).train(), plain) < 1e-12
    found = [
        StreamingOracle(LocalConfig(4, outer=DILOCO, **options)).train() for options in STREAMING
    ]
    for one, other in itertools.combinations([plain, *found], 2):
        assert difference(one, other) > 1e-6


@pytest.mark.some("5-outer0-2")
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


@pytest.mark.long
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


def saves_each_epoch(folder: str) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)


def fit_adamw(
    folder: str, resume: str | None, outer: OuterOptimizer | None, **options: Any
) -> tuple[dict[str, Tensor], float]:
    """Trains 2 epochs of 12 steps in rounds of 5, and saves behind each.

    Returns:
        The weights, and the sum of the squared gradients that this replica's optimizer estimates.
    """
    module = make_module(Classifier, optimizer="adamw")
    trainer = make_trainer(
        devices=2,
        strategy=DDPStrategy(sync_every=5, outer=outer, **options),
        limit_val_batches=0,
        enable_checkpointing=True,
        callbacks=[saves_each_epoch(folder)],
        max_epochs=2,
    )
    own = share_of(int(os.environ["RANK"]), NUM_SAMPLES)
    trainer.fit(module, own, make_loader(8), ckpt_path=resume)
    states = trainer.optimizers[0].state.values()
    return state_of(module), sum(float(state["exp_avg_sq"].sum()) for state in states)


@pytest.mark.some("outer1-options0")
@pytest.mark.parametrize("options", [{}, {"save_full": False}, {"async_save": True}])
@pytest.mark.parametrize("outer", [None, DILOCO])
def test_each_replica_goes_on_with_its_own_optimizer(
    workers: WorkerPool, tmp_path: Path, outer: OuterOptimizer | None, options: dict[str, Any]
) -> None:
    case = partial(fit_adamw, **options)
    whole = workers.run(2, case, str(tmp_path), None, outer)
    resumed = workers.run(2, case, str(tmp_path), str(tmp_path / "epoch=0.ckpt"), outer)
    for (weights, squares), (found, of_found) in zip(whole, resumed, strict=True):
        assert all(torch.equal(weights[name], found[name]) for name in weights)
        assert squares == of_found
    assert whole[0][1] != whole[1][1]


@pytest.mark.long
def test_another_number_of_replicas_begins_with_the_first_ones_state(
    workers: WorkerPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "epoch=0.ckpt")
    workers.run(2, fit_adamw, str(tmp_path), None, DILOCO)
    saved = torch.load(path, weights_only=True)
    first, second = saved["optimizer_states"][0], saved["replica_optimizer_states"][0]
    assert first["state"].keys() == second["state"].keys()
    assert not torch.equal(first["state"][0]["exp_avg"], second["state"][0]["exp_avg"])
    for found in workers.run(4, moments_at_start, path):
        assert torch.equal(found, first["state"][0]["exp_avg"])


def moments_at_start(path: str) -> Tensor:
    """Returns an estimate of this replica's optimizer with which a resumed run begins."""
    module = make_module(Classifier, optimizer="adamw")
    found: list[Tensor] = []

    def look() -> None:
        state = next(iter(module.optimizers().optimizer.state.values()))
        found.append(state["exp_avg"].clone())

    module.on_train_start = look
    strategy = DDPStrategy(sync_every=5, outer=DILOCO)
    trainer = make_trainer(
        devices=4,
        strategy=strategy,
        limit_val_batches=0,
        max_epochs=2,
        enable_checkpointing=True,
        callbacks=[saves_each_epoch(os.path.dirname(path))],
    )
    trainer.fit(module, make_loader(8), make_loader(8), ckpt_path=path)
    return found[0]


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
        ({"fragments": 0}, "fragments=0"),
        ({"sync_every": 4, "delay": 4}, "delay=4 must be below sync_every=4"),
        ({"sync_every": 4, "fragments": 5}, "fragments=5 must not be above sync_every=4"),
        ({"alpha": 1.0}, r"alpha=1\.0"),
        ({"wire": "fp16"}, "wire='fp16' is unknown"),
    ],
)
def test_what_does_not_go_with_it(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DDPStrategy(outer=DILOCO, **arguments)


def test_fragments_need_an_outer_optimizer() -> None:
    with pytest.raises(ValueError, match=r"fragments=2, .* go with outer=OuterOptimizer"):
        DDPStrategy(sync_every=4, fragments=2)


def many_fragments() -> str:
    with pytest.raises((ValueError, RankFailedError)) as caught:
        fit(100, DILOCO, streaming={"fragments": 99})
    return str(caught.value)


def test_more_fragments_than_parameters(workers: WorkerPool) -> None:
    for text in workers.run(2, many_fragments):
        assert "fragments=99 are more than the 38 parameters" in text
