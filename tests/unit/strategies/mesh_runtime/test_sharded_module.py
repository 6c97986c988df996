"""What a run that has failed leaves in a module that is sharded, on a rank that is alone."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.common.device_mesh import build_mesh
from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.parallelize.composition import parallelize
from lightning_dist.engine.parallelize.parallelism import Parallelism
from lightning_dist.engine.parallelize.shard_config import ShardConfig
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from lightning_dist.strategies.mesh_runtime.dry.fake_ranks import fake_rank
from lightning_dist.strategies.mesh_runtime.sharded_module import ShardedModule

PLAN = {"model.0": "colwise", "model.2": "rowwise"}


class Dropping(L.LightningModule):
    """Drops features of this rank's own, and then the same ones as the others."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(), nn.Linear(64, 8), nn.Dropout())

    def training_step(self, batch: Any) -> Tensor:
        return self.model(batch).sum()


def sharded() -> ShardedModule:
    config, shard = TensorConfig(PLAN), ShardConfig()
    asked = Parallelism(None, config, shard, shard.options(None))
    composed = parallelize(Dropping(), build_mesh(MeshShape(tp=2), "cpu"), asked)
    return ShardedModule(composed, None)


def dropped_by(sharded: ShardedModule) -> Tensor:
    seen: list[Tensor] = []
    model = sharded.module.model
    handles = [
        model[place].register_forward_hook(lambda _, __, output: seen.append(output == 0))
        for place in (1, 3)
    ]
    torch.manual_seed(3)
    sharded.train(sharded.module.training_step, nullcontext, torch.ones(2, 8))
    for handle in handles:
        handle.remove()
    return torch.cat([mask.flatten() for mask in seen])


def draw_and_fail(*_: Any) -> None:
    torch.rand(())
    raise RuntimeError("between the two projections")


def test_a_failure_inside_of_a_region_does_not_reach_the_next_run() -> None:
    with fake_rank(1, 2):
        expected = dropped_by(sharded())
        parallel = sharded()
        handle = parallel.module.model[1].register_forward_pre_hook(draw_and_fail)
        torch.manual_seed(5)
        with pytest.raises(RuntimeError, match="between the two projections"):
            parallel.train(parallel.module.training_step, nullcontext, torch.ones(2, 8))
        handle.remove()
        parallel.close(failed=True)
        shared = torch.rand(())
        assert torch.equal(dropped_by(parallel), expected)
        torch.manual_seed(5)
        torch.randint(2**62, ())  # what a region draws outside
        assert torch.equal(torch.rand(()), shared)
