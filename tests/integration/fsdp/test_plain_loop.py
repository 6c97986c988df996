"""Sharded parameters without Lightning, in a plain loop."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dist.engine.common.device_mesh import build_mesh
from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.parallelize import Parallelism, ShardConfig, parallelize
from lightning_dist.wrap import ByClass
from tests.helpers.networks.models import make_data, make_layers, make_optimizer
from tests.helpers.processes.workers import WorkerPool


def batches() -> DataLoader[Any]:
    return DataLoader(make_data(32), batch_size=8)


def model() -> nn.Module:
    torch.manual_seed(7)
    return make_layers().double()


def train() -> tuple[dict[str, Tensor], float]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    net = model()
    whole = sum(p.numel() for p in net.parameters())
    mesh = build_mesh(MeshShape(dp_shard=2), "cpu")
    parallel = parallelize(net, mesh, Parallelism(shard=ShardConfig(wrap=ByClass(["ConvLayer"]))))
    (root,) = parallel.roots
    optimizer = make_optimizer("sgd", net.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x), y)

    for x, y in batches():
        optimizer.zero_grad()
        root(step, x[rank::2], y[rank::2]).backward()
        optimizer.step()
    held = sum(p.to_local().numel() for p in net.parameters())
    state = {name: p.full_tensor().detach() for name, p in net.named_parameters()}
    return state, held / whole


def test_a_plain_loop_over_shards_equals_a_single_device(workers: WorkerPool) -> None:
    net = model()
    optimizer = make_optimizer("sgd", net.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    for state, share in workers.run(2, train):
        assert share < 0.6
        for name, value in net.named_parameters():
            torch.testing.assert_close(state[name], value.detach(), rtol=0, atol=1e-12)
