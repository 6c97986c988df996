"""Ways to shard the layers of one GPT over two processes, both on the whole batch.

torch's ``parallelize_module`` cannot cut a fused projection between heads, so queries, keys and
values are layers of their own here, for all contestants.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from lightning_dist import TensorParallelStrategy
from tests.benchmarks.contestants import (
    DEPTH,
    HEADS,
    WIDTH,
    PlainGPT,
    RunBatch,
    adamw,
    in_lightning,
    loss_of,
    model,
    timed_loop,
)

RAW_TP, LIGHTNINGS_TP = "torch parallelize_module", "Lightning's ModelParallelStrategy, tensor"
REFERENCES = {
    name: (RAW_TP, LIGHTNINGS_TP) for name in (RAW_TP, LIGHTNINGS_TP, "our TensorParallelStrategy")
}
PLAN = {
    "model.0.token": "vocab",
    "model.*.attention.q": "colwise",
    "model.*.attention.k": "colwise",
    "model.*.attention.v": "colwise",
    "model.*.attention.out": "rowwise",
    "model.*.up": "colwise",
    "model.*.down": "rowwise",
    f"model.{DEPTH + 1}.logits": "colwise_gather",
}


class Attention(nn.Module):
    """Causal self-attention on as many heads as its projections have."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            project(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        merged: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return merged


def unfused(net: nn.Sequential) -> nn.Sequential:
    """Gives the blocks attentions with three projections, always the same."""
    torch.manual_seed(1)
    for block in net[1:-1]:
        block.attention = Attention()
    return net


def parallelize(net: nn.Sequential, mesh: DeviceMesh) -> None:
    """Spreads each layer as :data:`PLAN` says."""
    colwise, rowwise = ColwiseParallel(), RowwiseParallel()
    parallelize_module(net[0], mesh, {"token": RowwiseParallel(input_layouts=Replicate())})
    for block in net[1:-1]:
        plan = {f"attention.{name}": colwise for name in "qkv"}
        plan |= {"attention.out": rowwise, "up": colwise, "down": rowwise}
        parallelize_module(block, mesh, plan)
    parallelize_module(net[-1], mesh, {"logits": ColwiseParallel(output_layouts=Replicate())})


def torch_tensor_parallel(rank: int, count: int) -> float:
    return timed_loop(count, tensor_parallel_loop())


def tensor_parallel_loop() -> RunBatch:
    net = unfused(model())
    parallelize(net, init_device_mesh("cpu", (2,)))
    optimizer = adamw(net.parameters())

    def run(x: Tensor, y: Tensor) -> None:
        loss_of(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


class UnfusedGPT(PlainGPT):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        unfused(self.model)


class SpreadGPT(UnfusedGPT):
    """Spreads itself, as ModelParallelStrategy wants it."""

    def configure_model(self) -> None:
        parallelize(self.model, self.device_mesh["tensor_parallel"])


def lightning_tensor_parallel(rank: int, count: int) -> float:
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
    return in_lightning(strategy, count, module_class=SpreadGPT)


def our_tensor_parallel(rank: int, count: int) -> float:
    return in_lightning(TensorParallelStrategy(plan=PLAN), count, module_class=UnfusedGPT)
