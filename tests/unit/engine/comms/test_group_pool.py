from __future__ import annotations

import gc
import weakref
from typing import Any

import torch.distributed as dist

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
