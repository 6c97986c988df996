"""What is told at the start of a run of how its model is sharded is what was done to it."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dist import DDPStrategy, FSDPStrategy, MeshStrategy, TensorParallelStrategy
from lightning_dist.strategies import ddp
from lightning_dist.strategies.base.process_mesh import ProcessMesh
from lightning_dist.strategies.mesh_runtime import data_parallel, placement
from tests.helpers.networks.models import make_optimizer, make_trainer
from tests.helpers.processes.workers import WorkerPool


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Blocks(L.LightningModule):
    def __init__(self, *, normed: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4) if normed else nn.Identity()
        self.blocks = nn.Sequential(Block(), Block())

    def training_step(self, batch: Tensor) -> Tensor:
        return self.blocks(self.norm(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return make_optimizer("sgd", self.parameters())


def told_by(strategy: ProcessMesh, *, normed: bool = False, **options: Any) -> list[str]:
    told: list[str] = []
    trainer = make_trainer(devices=2, strategy=strategy, max_steps=1, **options)
    with pytest.MonkeyPatch.context() as patch:
        for place in (data_parallel, ddp, placement):
            patch.setattr(place, "rank_zero_info", told.append)
        trainer.fit(Blocks(normed=normed), DataLoader(list(torch.ones(4, 4)), batch_size=2))
    return [line for line in told if "\n" not in line]  # the others are tables


def told_by_all() -> list[list[str]]:
    return [
        told_by(FSDPStrategy()),
        told_by(FSDPStrategy(shard_size=1)),
        told_by(TensorParallelStrategy()),
        told_by(MeshStrategy(pp=2, dp_shard=1)),
        told_by(DDPStrategy(), normed=True),
        told_by(DDPStrategy(), normed=True, sync_batchnorm=True),
    ]


def test_one_line_tells_how_a_model_is_spread(workers: WorkerPool) -> None:
    replicas = (
        "DDP: 2 replicas of 160 parameters; gradients averaged in buckets of 25 MB during the"
        " backward; 2 batches a step."
    )
    for lines in workers.run(2, told_by_all):
        shards, whole, tensor, stages, ddp_alone, ddp_synced = lines
        assert shards == ["FSDP: shards on 2 ranks: units Block x2 and the root; 2 batches a step."]
        assert whole == [
            "Mesh of 2 ranks, dp_replicate=2: the whole model on each rank; 2 batches a step."
        ]
        assert tensor == [
            "Tensor parallelism on 2 ranks: 4 layers with 95% of the parameters cut; 1 batch a"
            " step."
        ]
        assert stages == []  # the line of a pipeline has all of it
        assert ddp_synced == [replicas]
        assert ddp_alone[0] == replicas
        assert ddp_alone[1].startswith("norm (BatchNorm1d): statistics are those of a rank's own")
