"""Models that are no sequence on stages of shards and of replicas: what a single device gives."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_dist import MeshStrategy
from lightning_dist.engine.parallelize.shard_config import ShardConfig
from lightning_dist.engine.splitting.config import PipelineConfig
from tests.helpers.networks.models import (
    assert_equal,
    make_module,
    make_optimizer,
    make_trainer,
    state_of,
)
from tests.helpers.networks.traced_models import Pair, Task, UNet, make_images
from tests.helpers.processes.workers import WorkerPool

State = dict[str, Tensor]


class Deferred(Task):
    """Is built by `configure_model`, so without memory at first."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(7)
            self.net = UNet().double()


def shards(schedule: str = "1f1b", **options: Any) -> MeshStrategy:
    config = PipelineConfig(schedule, num_microbatches=2)
    return MeshStrategy(pp=2, dp_shard=2, pipeline=config, shard=ShardConfig(**options))


def replicas(schedule: str = "1f1b", **options: Any) -> MeshStrategy:
    config = PipelineConfig(schedule, num_microbatches=2, layers="trace")
    return MeshStrategy(pp=2, dp_replicate=2, dp_shard=1, pipeline=config, **options)


UPDATES: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
RUNS: dict[str, tuple[type[Task], Callable[[], MeshStrategy], dict[str, Any]]] = {
    "shards": (Task, shards, UPDATES),
    "zbv, gathered anew": (Task, lambda: shards("zbv", reshard_after_forward=True), {}),
    "own module, replicas": (Pair, lambda: replicas("interleaved_1f1b"), UPDATES),
    "built late": (Deferred, lambda: shards("zb_h1"), {}),
}
NUM_SAMPLES = 24


def images(num_replicas: int) -> DataLoader[Any]:
    """One replica's share of each batch of eight."""
    rank = int(os.environ["RANK"]) % num_replicas if num_replicas > 1 else 0
    own = range(rank, NUM_SAMPLES, num_replicas)
    return DataLoader(Subset(make_images(NUM_SAMPLES).dataset, own), batch_size=8 // num_replicas)


def fit(
    class_: type[Task],
    strategy: Any,
    options: dict[str, Any],
    num_replicas: int,
    epochs: int = 2,
    save: str | None = None,
    resume: str | None = None,
) -> tuple[State, dict[str, float]]:
    """Trains, and validates again in a run of its own."""
    module = make_module(class_)
    devices = 1 if num_replicas == 1 else 4
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=epochs, **options)
    loader = images(num_replicas)
    trainer.fit(module, loader, loader, ckpt_path=resume, weights_only=True)
    if save is not None:
        trainer.save_checkpoint(save)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    (validated,) = trainer.validate(module, loader, verbose=False)
    return state_of(module), metrics | validated


def fit_mesh(run: str) -> tuple[State, dict[str, float]]:
    class_, strategy, options = RUNS[run]
    return fit(class_, strategy(), options, 2)


def fit_alone(run: str) -> tuple[State, dict[str, float]]:
    class_, _, options = RUNS[run]
    return fit(class_, "auto", options, 1)


def assert_stages_equal(ranks: list[State], expected: State) -> None:
    assert {name for state in ranks for name in state} == expected.keys()
    for state in ranks:
        assert_equal(state, {name: expected[name] for name in state})


@pytest.mark.some("shards")
@pytest.mark.parametrize("run", RUNS)
def test_equals_a_single_device(workers: WorkerPool, run: str) -> None:
    ((state, metrics),) = workers.run(1, fit_alone, run)
    ranks = workers.run(4, fit_mesh, run, timeout=120.0)
    assert_stages_equal([held for held, _ in ranks], state)
    for held, known in ranks:
        assert known == pytest.approx(metrics, abs=1e-12)
        assert held.keys() < state.keys(), "no rank holds all of it"


def resume_in_turn(path: str) -> State:
    """An epoch on shards, one more on replicas."""
    fit(Task, shards(), {}, 2, epochs=1, save=f"{path}/first")
    return fit(Task, replicas(save_full=True), {}, 2, epochs=2, resume=f"{path}/first")[0]


def test_other_layouts_go_on_from_a_checkpoint(workers: WorkerPool, tmp_path: Any) -> None:
    ((state, _),) = workers.run(1, fit, Task, "auto", {}, 1)
    assert_stages_equal(workers.run(4, resume_in_turn, str(tmp_path), timeout=120.0), state)


def in_single_precision(loader: DataLoader[Any]) -> DataLoader[Any]:
    batches: Any = [(x.float(), y.float()) for x, y in loader]
    return DataLoader(batches, batch_size=None)


def fit_half() -> State:
    module = make_module(Task).float()
    config = PipelineConfig(num_microbatches=1)
    trainer = make_trainer(
        devices=4,
        strategy=MeshStrategy(pp=2, dp_shard=2, pipeline=config),
        precision="bf16-mixed",
        limit_val_batches=0,
    )
    loader = in_single_precision(images(2))
    trainer.fit(module, loader, loader)
    return state_of(module)


def fit_half_alone() -> State:
    """The recursion: gradients of weights that are gathered in bf16, added up in fp32."""
    module = make_module(Task).float()
    optimizer = make_optimizer("adamw", module.parameters())
    for x, y in in_single_precision(images(1)):
        optimizer.zero_grad()
        for index in range(2):
            used = {n: p.detach().bfloat16().requires_grad_() for n, p in named(module)}
            with torch.autocast("cpu", torch.bfloat16):
                output = torch.func.functional_call(module.net, used, x[index::2])
                loss = F.mse_loss(output, y[index::2])
            found = torch.autograd.grad(loss, list(used.values()))
            for (_, parameter), gradient in zip(named(module), found, strict=True):
                half = gradient.float() / 2
                parameter.grad = half if parameter.grad is None else parameter.grad + half
        optimizer.step()
    return state_of(module)


def named(module: Any) -> list[tuple[str, Tensor]]:
    return list(module.net.named_parameters())


@pytest.mark.long
def test_shards_are_gathered_in_half_precision(workers: WorkerPool) -> None:
    (expected,) = workers.run(1, fit_half_alone)
    for held in workers.run(4, fit_half, timeout=120.0):
        for name, value in held.items():
            assert torch.equal(value, expected[name]), name
