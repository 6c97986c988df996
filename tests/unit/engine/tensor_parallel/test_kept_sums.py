"""Gradients that stay over an update are summed once, on ranks that do not exist."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_dist.engine.tensor_parallel.apply import TensorParallelModule
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.strategies.mesh_runtime.dry.fake_ranks import fake_rank

ALL = [1.0, 1.0]
NONE = [0.0, 0.0]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(2, 2, bias=False)
        self.other = nn.Linear(2, 2, bias=False)


@pytest.mark.parametrize(("rank", "counted"), [(0, ALL), (1, NONE)])
def test_one_rank_counts_what_was_summed_before(rank: int, counted: list[float]) -> None:
    with fake_rank(rank, 2):
        network = Network()
        styles = {"gate": Style.LOCAL, "other": Style.LOCAL}
        sharded = TensorParallelModule(network, styles, init_device_mesh("cpu", (2,)))
        gate, other = network.gate.weight, network.other.weight
        for parameter in (gate, other):
            parameter.grad = torch.ones(2, 2)
        sharded.begin_backward()
        assert gate.grad is not None
        assert gate.grad[0].tolist() == ALL, "not a sum"
        sharded.add_gradients()
        gate.requires_grad_(False)
        sharded.begin_backward()
        assert gate.grad[0].tolist() == ALL, "frozen"
        assert other.grad is not None
        assert other.grad[0].tolist() == counted
        other.grad.fill_(1.0)  # what a backward adds
        gate.requires_grad_(True)
        sharded.begin_backward()
        assert gate.grad[0].tolist() == counted
        assert other.grad[0].tolist() == ALL, "counted before"
        sharded.add_gradients()
        gate.grad = other.grad = None
        sharded.begin_backward()
        assert gate.grad is None
