from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.comms.group_pool import forget_worlds, pool_of_world
from lightning_dist.strategies.mesh_runtime.dry.fake_ranks import fake_rank


def end_a_world() -> weakref.ref[Any]:
    with fake_rank(0, 2):
        pool_of_world().mesh(MeshShape(dp_shard=2), "cpu", "fake")
        assert dist.group.WORLD is not None
        return weakref.ref(dist.group.WORLD)


def test_a_later_world_frees_the_groups_of_an_earlier_one() -> None:
    first = end_a_world()
    second = end_a_world()
    gc.collect()
    assert first() is None
    forget_worlds()
    gc.collect()
    assert second() is None


def add_on_a_mesh() -> DTensor:
    with fake_rank(0, 4):
        mesh = pool_of_world().mesh(MeshShape(dp_replicate=2, dp_shard=2), "cpu", "fake")
        return distribute_tensor(torch.ones(4), mesh["dp_shard"], [Shard(0)]) + 1.0


def test_tensors_of_a_later_world_are_on_its_own_mesh() -> None:
    first, second = add_on_a_mesh(), add_on_a_mesh()
    assert first.device_mesh == second.device_mesh
    assert first.device_mesh is not second.device_mesh
