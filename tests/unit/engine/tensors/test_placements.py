from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_dist.engine.tensors import dtensor
from lightning_dist.engine.tensors.dtensor import (
    crashes_in_gathers,
    cut,
    is_storable,
    local_part,
    stacked,
    stacked_dim,
    storable,
    unstacked,
    whole,
)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Rank 1 of 2, without the other."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_has_its_part_of_each_matrix(mesh: DeviceMesh, dim: int) -> None:
    whole = torch.arange(48.0).view(12, 4) if dim == 0 else torch.arange(48.0).view(4, 12)
    own = cut(whole, mesh, [stacked(dim, 3)])
    parts = [matrix.chunk(2, dim)[1] for matrix in whole.chunk(3, dim)]
    assert torch.equal(own.to_local(), torch.cat(parts, dim))
    assert own.shape == whole.shape
    assert stacked_dim(own) == dim
    assert not is_storable(own)


def test_a_contiguous_piece_is_none_of_this(mesh: DeviceMesh) -> None:
    own = cut(torch.ones(4, 4), mesh, [Shard(0)])
    assert isinstance(own, DTensor)
    assert stacked_dim(own) is None
    assert is_storable(own)
    assert stacked_dim(torch.ones(2)) is None


@pytest.mark.parametrize("dim", [0, 1])
def test_the_matrices_may_have_a_dim_of_their_own(mesh: DeviceMesh, dim: int) -> None:
    whole = torch.arange(48.0).view(12, 4) if dim == 0 else torch.arange(48.0).view(4, 12)
    own = unstacked(cut(whole, mesh, [stacked(dim, 3)]))
    apart = whole.unflatten(dim, (3, 4))
    assert torch.equal(own.to_local(), apart.chunk(2, dim + 1)[1])
    assert own.shape == apart.shape
    assert own.stride() == apart.stride()
    assert own.placements == (Shard(dim + 1),)


def test_another_axis_goes_on_sharding_what_it_has_sharded() -> None:
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for dim in (0, 1):
        whole = torch.arange(60.0).view(12, 5) if dim == 0 else torch.arange(60.0).view(5, 12)
        own = unstacked(cut(whole, mesh, [Shard(1 - dim), stacked(dim, 3)]))
        apart = whole.unflatten(dim, (3, 4))
        other = 2 if dim == 0 else 0
        assert torch.equal(own.to_local(), apart.chunk(2, other)[1].chunk(2, dim + 1)[1])
        assert own.shape == apart.shape
        assert own.placements == (Shard(other), Shard(dim + 1))
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Shard(0), stacked(0, 3)])
def test_a_gather_moves_shards_to_the_device_of_the_mesh(placement: Placement) -> None:
    """NCCL takes no shards in host memory, which offloading and the end of a run leave there."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    device = init_device_mesh("meta", (2,))  # a device as any other, that needs no hardware
    on_device = cut(torch.empty(12, 4, device="meta"), device, [placement])
    assert isinstance(on_device, DTensor)
    on_host = DTensor(torch.ones(6, 4), on_device._spec, requires_grad=False)
    assert local_part(on_host).device.type == "cpu"
    gathered = whole(on_host)
    assert (gathered.device.type, gathered.shape) == ("meta", (12, 4))
    dist.destroy_process_group()


def test_gathers_that_would_crash_are_made_in_host_memory(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def crash(backend: str, device_type: str) -> bool:
        asked.append((backend, device_type))
        return True

    monkeypatch.setattr(dtensor, "crashes_in_gathers", crash)
    moved: list[DTensor] = []
    monkeypatch.setattr(DTensor, "cpu", lambda tensor: moved.append(tensor) or tensor)
    value = torch.arange(6.0)
    own = cut(value, mesh, [Replicate()])
    assert torch.equal(whole(own), value)
    assert asked == [("fake", "cpu")]
    assert len(moved) == 1
    assert moved[0] is own


def test_gathers_crash_over_gloo_on_a_gpu() -> None:
    assert crashes_in_gathers("gloo", "cuda")
    assert not crashes_in_gathers("gloo", "cpu")
    assert not crashes_in_gathers("nccl", "cuda")


def test_summands_are_stored_as_their_sum(mesh: DeviceMesh) -> None:
    summand = DTensor.from_local(torch.tensor(3.0), mesh, [Partial()])
    stored = storable(summand)
    assert isinstance(stored, DTensor)
    assert stored.placements == (Replicate(),)
    own = cut(torch.ones(4, 4), mesh, [Shard(0)])
    assert storable(own) is own


def test_summands_are_added_up_on_the_device_of_the_mesh() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    device = init_device_mesh("meta", (2,))
    on_device = DTensor.from_local(torch.empty((), device="meta"), device, [Partial()])
    on_host = DTensor(torch.tensor(3.0), on_device._spec, requires_grad=False)
    assert storable(on_host).device.type == "meta"
    dist.destroy_process_group()
