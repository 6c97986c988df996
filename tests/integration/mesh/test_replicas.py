"""Whole layers on a mesh have a single device's parameters, and its freedoms."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_dist import MeshStrategy
from lightning_dist.engine.splitting.config import PipelineConfig
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_trainer,
    share_of,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool

NUM_SAMPLES = 16


class Scaled(Classifier):
    """Has a parameter without dimensions, which FSDP cannot shard."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.scale * super().training_step(batch, batch_idx)


class SometimesScaled(Scaled):
    """Uses the parameter on the first rank only."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == 0:
            return super().training_step(batch, batch_idx)
        return Classifier.training_step(self, batch, batch_idx)


def train(num_ranks: int, kind: type[Scaled] = Scaled) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = kind().double()
    loader = make_loader(NUM_SAMPLES)
    if num_ranks > 1:
        loader = share_of(int(os.environ["RANK"]), NUM_SAMPLES)
    trainer = make_trainer(devices=num_ranks, strategy=MeshStrategy(dp_replicate=num_ranks))
    trainer.fit(module, loader, make_loader(8))
    assert not any(isinstance(parameter, DTensor) for parameter in module.parameters())
    return state_of(module)


def test_a_mesh_of_replicas_trains_as_one_device(workers: WorkerPool) -> None:
    (alone,) = workers.run(1, train, 1)
    assert alone["scale"].ndim == 0
    assert float(alone["scale"]) != 1.5
    for together in workers.run(2, train, 2):
        for name, value in alone.items():
            torch.testing.assert_close(together[name], value, rtol=0, atol=1e-12)


def test_a_gradient_that_a_rank_does_not_have_is_zero(workers: WorkerPool) -> None:
    first, second = workers.run(2, train, 2, SometimesScaled)
    assert float(first["scale"]) != 1.5
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def train_with_hooks(num_ranks: int) -> dict[str, Tensor]:
    module = make_module()
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
    pipeline = PipelineConfig(num_microbatches=4)
    strategy = MeshStrategy(pp=2, pipeline=pipeline) if num_ranks == 2 else "auto"
    trainer = make_trainer(devices=num_ranks, strategy=strategy)
    trainer.fit(module, make_loader(NUM_SAMPLES), make_loader(8))
    return state_of(module)


def test_hooks_see_the_whole_gradient_of_a_stage(workers: WorkerPool) -> None:
    (alone,) = workers.run(1, train_with_hooks, 1)
    for stage in workers.run(2, train_with_hooks, 2):
        for name, value in stage.items():
            torch.testing.assert_close(value, alone[name], rtol=0, atol=1e-12)
