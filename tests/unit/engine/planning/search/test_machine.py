from __future__ import annotations

import pytest

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.planning.links import Link, LinksByKind
from lightning_dist.engine.planning.search.machine import NO_LINK, Machine
from lightning_dist.engine.planning.traffic import MessageKind

INSIDE, BETWEEN = Link(1e-6, 8e9), Link(1e-3, 4e9)
SEND, ALL_REDUCE = MessageKind.SEND, MessageKind.ALL_REDUCE


def test_an_axis_that_leaves_a_host_shares_its_link() -> None:
    machine = Machine(8, 1e9, num_hosts=2, within=LinksByKind(INSIDE), between=LinksByKind(BETWEEN))
    mesh = MeshShape(pp=2, dp_shard=2, tp=2)
    assert machine.link(mesh, "tp", SEND) == machine.link(mesh, "dp_shard", SEND) == INSIDE
    assert machine.link(mesh, "dp_replicate", SEND) == NO_LINK.send
    assert machine.link(mesh, "pp", SEND) == Link(1e-3, 1e9)  # four pairs over one link
    assert machine.link(MeshShape(dp_shard=8), "dp_shard", SEND) == BETWEEN  # one ring
    assert machine.link(MeshShape(dp_shard=4, tp=2), "dp_shard", SEND) == Link(1e-3, 2e9)


def test_a_collective_has_a_link_of_its_own() -> None:
    own = LinksByKind(BETWEEN, {ALL_REDUCE: Link(2e-3, 1e9)})
    machine = Machine(4, 1e9, num_hosts=2, within=LinksByKind(INSIDE), between=own)
    mesh = MeshShape(dp_replicate=2, dp_shard=2)
    assert machine.link(mesh, "dp_replicate", ALL_REDUCE) == Link(2e-3, 0.5e9)
    assert machine.link(mesh, "dp_replicate", SEND) == Link(1e-3, 2e9)
    assert machine.link(mesh, "dp_shard", ALL_REDUCE) == INSIDE


def test_ranks_that_share_processors() -> None:
    assert Machine(4, 1e9).crowding == 1.0
    assert Machine(4, 1e9, processors=2).crowding == 2.0
    assert Machine(4, 1e9, num_hosts=4, processors=2).crowding == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_hosts": 3}, "num_hosts=3 does not divide"),
        ({"memory_bytes": 0.0}, "memory_bytes=0.0"),
        ({"overlap": 1.5}, "overlap=1.5"),
        ({"processors": 0}, "processors=0"),
        ({"world_size": 0}, "world_size=0"),
    ],
)
def test_numbers_out_of_range(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Machine(**{"world_size": 4, "memory_bytes": 1e9} | arguments)  # type: ignore[arg-type]
