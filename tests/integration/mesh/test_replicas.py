"""Whole layers on a mesh have a single device's parameters, and its freedoms."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import MeshStrategy
from lightning_dist.callbacks import MixedPrecision
from lightning_dist.engine.parallelize.shard_config import ReduceDtype, ShardConfig
from lightning_dist.engine.splitting.config import PipelineConfig
from tests.helpers.networks.models import (
    Classifier,
    make_data,
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


def dtypes_sent(reduce_dtype: ReduceDtype) -> set[torch.dtype]:
    """Returns the floating dtypes that are summed along ``dp_replicate`` in a fit."""
    found: set[torch.dtype] = set()
    send = dist.all_reduce

    def record(tensor: Tensor, *args: Any, **options: Any) -> Any:
        if tensor.is_floating_point() and tensor.numel() > 100:
            found.add(tensor.dtype)
        return send(tensor, *args, **options)

    trainer = make_trainer(
        devices=4,
        strategy=MeshStrategy(pp=2, dp_replicate=2, shard=ShardConfig(reduce_dtype=reduce_dtype)),
        callbacks=[MixedPrecision("bf16")],
        limit_val_batches=0,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", record)
        x, y = make_data(NUM_SAMPLES).tensors
        loader = DataLoader(TensorDataset(x.float(), y), batch_size=8)
        trainer.fit(make_module().float(), loader, loader)
    return found


def test_replicas_of_stages_send_what_reduce_dtype_says(workers: WorkerPool) -> None:
    assert workers.run(4, dtypes_sent, "float32") == [{torch.float32}] * 4
    assert workers.run(4, dtypes_sent, "bfloat16") == [{torch.bfloat16}] * 4
