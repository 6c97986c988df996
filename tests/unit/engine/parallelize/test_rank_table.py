from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.parallelize.rank_table import RankRow, RankTable, gather_rank_table
from lightning_dist.engine.tensors.dtensor import cut
from lightning_dist.strategies.mesh_runtime.dry.fake_ranks import fake_rank

MESH = MeshShape(pp=2, dp_shard=2, tp=2)


def table(mesh: MeshShape) -> RankTable:
    ranks = range(mesh.world_size)
    return RankTable(mesh, tuple(RankRow(r, "here", "model.0 to 2", 1_500, 6_000) for r in ranks))


def test_each_rank_has_a_line_with_its_place_on_the_axes_there_are() -> None:
    header, *lines = str(table(MESH)).splitlines()
    assert header.split() == [
        *("rank", "host", "pp", "dp_shard", "tp", "layers", "parameters", "bytes")
    ]
    assert len(lines) == 8
    assert [line.split()[:5] for line in lines[4:6]] == [
        ["4", "here", "1", "0", "0"],
        ["5", "here", "1", "0", "1"],
    ]
    assert lines[4].split()[5:] == ["model.0", "to", "2", "1,500", "6,000"]


def test_a_large_mesh_is_not_written_out() -> None:
    *lines, last = str(table(MeshShape(dp_replicate=40))).splitlines()
    assert len(lines) == 1 + 32
    assert last == "... and 8 more"


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A group of this process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def sharded() -> nn.Linear:
    """A layer of 6 x 4 and 6 parameters; of the weight this rank has a half."""
    module = nn.Linear(4, 6)
    with fake_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        module.weight = nn.Parameter(cut(torch.ones(6, 4), mesh, [Shard(0)]))
    return module


def test_a_rank_counts_what_it_holds(sharded: nn.Linear, alone: dist.ProcessGroup) -> None:
    (row,) = gather_rank_table(sharded, MeshShape(), "all", alone).rows
    assert row == RankRow(0, socket.gethostname(), "all", 12 + 6, 18 * 4)


def test_hosts_are_counted() -> None:
    mesh = MeshShape(dp_shard=2)
    rows = [RankRow(rank, host, "all", 1, 4) for rank, host in enumerate("ab")]
    assert RankTable(mesh, tuple(rows)).num_hosts == 2
    assert RankTable(mesh, tuple(rows[:1])).num_hosts == 1
