"""What ranks of this host measure of each other, by which AutoStrategy plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dist.engine.common.mesh_shape import DATA_AXES, MeshShape
from lightning_dist.engine.comms.group_pool import pool_of_world
from lightning_dist.engine.planning.traffic import MessageKind
from lightning_dist.strategies.mesh_runtime.measuring.machine import (
    measure_alone,
    measure_axis,
    measure_stages,
    measure_tensor_layers,
    measure_updates,
)
from tests.helpers.processes.workers import WorkerPool

MEGABYTES = 4 << 20


def measure() -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    device = torch.device("cpu")
    pool = pool_of_world()
    replicas = pool.mesh(MeshShape(dp_replicate=2), "cpu", "gloo")
    found = {
        "alone": measure_alone(replicas["dp_shard"], device, 4),
        "axis": measure_axis(pool.mesh(MeshShape(tp=2), "cpu", "gloo")["tp"], device, 4),
        "tensor": measure_tensor_layers(pool.mesh(MeshShape(tp=2), "cpu", "gloo"), device),
        "updates": measure_updates(replicas[DATA_AXES], device, 2),
        "stages": measure_stages(MeshShape(pp=2), dist.get_rank(), 30.0),
    }
    dist.destroy_process_group()
    return found


@pytest.mark.long  # of the default tests, those of AutoStrategy use all of it
def test_all_ranks_find_the_same_and_sharing_costs_more_than_being_alone(
    workers: WorkerPool,
) -> None:
    first, second = workers.run(2, measure)
    assert first == second
    alone, axis = first["alone"], first["axis"]
    for kind in (MessageKind.ALL_GATHER, MessageKind.REDUCE_SCATTER):
        assert 0 < alone.of(kind).seconds(MEGABYTES) < axis.of(kind).seconds(MEGABYTES) < 5
    assert 0 < axis.of(MessageKind.ALL_REDUCE).seconds(MEGABYTES) < 5
    assert 0 < axis.send.seconds(MEGABYTES) < 5
    assert 0 <= first["tensor"] < 1
    assert 0 < first["updates"] < 0.1
    assert 0 < first["stages"] < 1
