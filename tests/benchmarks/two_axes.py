"""Ways to train one GPT on two axes: two shards of layers that two processes share.

The layers are sharded as in :mod:`tests.benchmarks.tensor_parallel`, and the blocks sharded as in
:mod:`tests.benchmarks.data_parallel`. Each pair of tensor-parallel processes takes half of a batch.
"""

from __future__ import annotations

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_dist import MeshStrategy
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from tests.benchmarks.contestants import (
    RunBatch,
    adamw,
    in_lightning,
    loss_of,
    model,
    timed_loop,
)
from tests.benchmarks.data_parallel import SHARE, shard_blocks
from tests.benchmarks.tensor_parallel import PLAN, UnfusedGPT, parallelize, unfused

NUM_PROCESSES = 4
RAW_2D = "torch parallelize_module and fully_shard, 2-D"
LIGHTNINGS_2D = "Lightning's ModelParallelStrategy, 2-D"
OURS_2D = "our MeshStrategy, 2-D"
REFERENCES = {name: (RAW_2D, LIGHTNINGS_2D) for name in (RAW_2D, LIGHTNINGS_2D, OURS_2D)}


def torch_2d(rank: int, count: int) -> float:
    return timed_loop(count, loop_2d(), SHARE)


def loop_2d() -> RunBatch:
    net = unfused(model())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize(net, mesh["tensor"])
    shard_blocks(net, mesh["data"])
    optimizer = adamw(net.parameters())

    def run(x: Tensor, y: Tensor) -> None:
        loss_of(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


class SpreadAndShardedGPT(UnfusedGPT):
    """Spreads and shards itself, as ModelParallelStrategy wants it."""

    def configure_model(self) -> None:
        parallelize(self.model, self.device_mesh["tensor_parallel"])
        shard_blocks(self.model, self.device_mesh["data_parallel"])


def lightning_2d(rank: int, count: int) -> float:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
    return in_lightning(strategy, count, SHARE, SpreadAndShardedGPT, devices=NUM_PROCESSES)


def our_2d(rank: int, count: int) -> float:
    strategy = MeshStrategy(dp_shard=2, tp=2, tensor=TensorConfig(plan=PLAN))
    return in_lightning(strategy, count, SHARE, UnfusedGPT, devices=NUM_PROCESSES)
