from __future__ import annotations

import pytest

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.planning.links import Link
from lightning_dist.engine.planning.search.machine import NO_LINK, Machine

INSIDE, BETWEEN = Link(1e-6, 8e9), Link(1e-3, 4e9)


def test_an_axis_that_leaves_a_host_shares_its_link() -> None:
    machine = Machine(8, 1e9, num_hosts=2, within=INSIDE, between=BETWEEN)
    mesh = MeshShape(pp=2, dp_shard=2, tp=2)
    assert machine.link(mesh, "tp") == machine.link(mesh, "dp_shard") == INSIDE
    assert machine.link(mesh, "dp_replicate") == NO_LINK
    assert machine.link(mesh, "pp") == Link(1e-3, 1e9)  # four pairs over one link
    assert machine.link(MeshShape(dp_shard=8), "dp_shard") == BETWEEN  # one ring
    assert machine.link(MeshShape(dp_shard=4, tp=2), "dp_shard") == Link(1e-3, 2e9)


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
