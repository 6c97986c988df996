"""Batches of graphs, whose nodes are joined: whole on each stage, as on one device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.schedules.registry import PipelineShape
from tests.helpers.processes.threads import run_ranks

Graphs = tuple[Tensor, Tensor, Tensor]  # nodes, edges, and the nodes' graphs


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.sent = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, graphs: Graphs) -> Graphs:
        nodes, edges, places = graphs
        received = torch.zeros_like(nodes).index_add_(0, edges[1], self.sent(nodes)[edges[0]])
        return torch.tanh(self.own(nodes) + received), edges, places


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Convolution(), Convolution()).double()


def batches() -> list[tuple[Graphs, Tensor]]:
    data = torch.Generator().manual_seed(1)
    found = []
    for num_nodes, num_edges, num_graphs in ((7, 9, 3), (5, 4, 2)):
        nodes = torch.randn(num_nodes, 3, generator=data, dtype=torch.float64)
        edges = torch.randint(num_nodes, (2, num_edges), generator=data)
        places = torch.arange(num_nodes) % num_graphs
        targets = torch.randn(num_graphs, 3, generator=data, dtype=torch.float64)
        found.append(((nodes, edges, places), targets))
    return found


def loss_of(model: nn.Module, batch: tuple[Graphs, Tensor]) -> Tensor:
    graphs, targets = batch
    nodes, _, places = model(graphs)
    return (torch.zeros_like(targets).index_add_(0, places, nodes) - targets).square().mean()


def train(model: nn.Sequential, pipeline: Pipeline) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        pipeline.train_batch(batch, lambda m: loss_of(model, m.content))
        optimizer.zero_grad()
        pipeline.install_gradients()
        with pipeline.updating():
            optimizer.step()
        with torch.no_grad():
            pipeline.evaluate_batch(batch, lambda m: loss_of(model, m.content), 1)
    return [p.detach() for p in model[pipeline.shape.rank].parameters()]


def test_joined_graphs_equal_one_device() -> None:
    expected = make()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for batch in batches():
        optimizer.zero_grad()
        loss_of(expected, batch).backward()
        optimizer.step()
    shapes = [PipelineShape("1f1b", 1, (1, 1), rank) for rank in range(2)]
    for layer, found in zip(expected, run_ranks(make, shapes, train), strict=True):
        torch.testing.assert_close(
            found, [p.detach() for p in layer.parameters()], rtol=1e-12, atol=1e-14
        )


def test_joined_graphs_are_not_cut() -> None:
    shapes = [PipelineShape("1f1b", 2, (1, 1), rank) for rank in range(2)]
    with pytest.raises(ValueError, match="leave batches whole with num_microbatches=1"):
        run_ranks(make, shapes, train)
