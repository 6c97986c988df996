from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.engine.common.mesh_shape import AXES, MeshShape, fill_mesh

sizes = st.integers(1, 3)


@given(sizes, sizes, sizes, sizes)
def test_each_rank_has_a_place_and_each_place_a_rank(pp: int, r: int, s: int, tp: int) -> None:
    mesh = MeshShape(pp, r, s, tp)
    places = [tuple(mesh.coordinates(rank).values()) for rank in range(mesh.world_size)]
    assert places == list(product(range(pp), range(r), range(s), range(tp)))
    for axes in (("pp",), ("dp_replicate", "dp_shard"), tuple(mesh.sizes)):
        groups = mesh.groups(*axes)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    assert {mesh.data_index(rank) for rank in range(mesh.world_size)} == set(range(mesh.data_size))


def test_tp_is_innermost_and_pp_outermost() -> None:
    mesh = MeshShape(pp=2, dp_replicate=2, tp=2)
    assert mesh.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert mesh.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]


@given(sizes, sizes, sizes, sizes, st.data())
def test_peers_differ_along_some_axes_only(
    pp: int, r: int, s: int, tp: int, data: st.DataObject
) -> None:
    mesh = MeshShape(pp, r, s, tp)
    rank = data.draw(st.integers(0, mesh.world_size - 1))
    axes = data.draw(st.sets(st.sampled_from(AXES)))
    fixed = [axis for axis in AXES if axis not in axes]
    own = mesh.coordinates(rank)
    found = mesh.peers(rank, *axes)
    assert found == [
        other
        for other in range(mesh.world_size)
        if all(mesh.coordinates(other)[axis] == own[axis] for axis in fixed)
    ]
    assert mesh.groups(*axes).count(found) == 1


def test_the_cost_of_peers_is_that_of_their_number_not_of_the_worlds() -> None:
    assert MeshShape(pp=2**40, tp=2).peers(5, "tp") == [4, 5]


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="tp=0 must"):
        MeshShape(tp=0)


def test_an_open_axis_takes_what_is_left() -> None:
    assert fill_mesh(8, dp_replicate=1, dp_shard="auto", tp=2) == MeshShape(dp_shard=4, tp=2)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            {"dp_replicate": 1, "dp_shard": "auto", "tp": 3},
            ["tp=3", "dp_shard=2 x tp=4", "dp_shard=4 x tp=2"],
        ),
        (
            {"dp_replicate": 2, "dp_shard": 2, "tp": 1},
            ["dp_replicate=2 x dp_shard=4"],
        ),
        ({"dp_replicate": 16, "dp_shard": "auto", "tp": 1}, ["dp_replicate=16", "dp_replicate=8"]),
    ],
)
def test_sizes_that_do_not_fill_the_world_are_refused(
    sizes: dict[str, int], words: list[str]
) -> None:
    with pytest.raises(ValueError, match="world size of 8") as caught:
        fill_mesh(8, **sizes)
    for word in words:
        assert word in str(caught.value)
    assert "pp=" not in str(caught.value), "an axis that was not asked for"


def test_axes_between_ranks() -> None:
    mesh = MeshShape(pp=2, dp_replicate=2, tp=2)
    assert mesh.axes_between([3]) == ()
    assert mesh.axes_between(mesh.peers(5, "tp")) == ("tp",)
    assert mesh.axes_between(mesh.peers(5, "pp", "tp")) == ("pp", "tp")
