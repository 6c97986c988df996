"""Each private name of torch that dry runs stand on, called on the real thing."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.planning.traffic import MessageKind, Traffic, TrafficLedger
from lightning_dist.engine.profiling.meters.traffic_counter import (
    TrafficCounter,
    ranks_of_collective,
)
from lightning_dist.strategies.mesh_runtime.dry.fake_ranks import fake_rank, without_values


def ignore(*_: Any) -> None:
    pass


def test_this_process_is_a_rank_for_a_while() -> None:
    say_error = sys.excepthook
    with fake_rank(513, 1024):
        assert (dist.get_rank(), dist.get_world_size()) == (513, 1024)
    assert not dist.is_initialized()
    assert sys.excepthook is say_error


def test_a_rank_cannot_be_another_one() -> None:
    with (
        fake_rank(1, 2),
        pytest.raises(ValueError, match="is rank 1 of 2 already, and cannot be rank 0 of 4"),
        fake_rank(0, 4),
    ):
        pass
    assert not dist.is_initialized()


def test_a_failure_ends_it_too() -> None:
    with pytest.raises(RuntimeError, match="x"), fake_rank(0, 2):
        raise RuntimeError("x")
    assert not dist.is_initialized()


def test_each_rank_has_groups_of_its_own() -> None:
    seen = []
    for rank in (0, 2):
        with fake_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))["tp"]
            with without_values(ignore):
                part = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
                assert part.full_tensor().shape == (4,)
            seen.append(dist.get_process_group_ranks(mesh.get_group()))
    assert seen == [[0, 1], [2, 3]]


def test_tensors_take_no_memory_and_have_ones_for_values() -> None:
    with without_values(ignore):
        huge = torch.empty(2**50)
        assert huge.device.type == "cpu"
        assert (huge.sum().item(), int(torch.randint(5, ())), bool(huge[0] > 1)) == (1.0, 1, True)


def test_what_torch_compiles_is_compiled_for_tensors_with_values() -> None:
    runs: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            runs.append("compiled")
            return graph(*args)

        return run

    @torch.compile(backend=backend, fullgraph=True)
    def halve(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    seen: list[str] = []
    with without_values(lambda func, *_: seen.append(str(func))):
        halve(torch.ones(3))
    assert "aten.div.Tensor" in seen
    assert not runs
    assert torch.equal(halve(torch.ones(3)), torch.full((3,), 0.5))
    assert runs


def test_a_shape_that_depends_on_values_is_refused() -> None:
    with pytest.raises(ValueError, match="nonzero"), without_values(ignore):
        torch.ones(3).nonzero()


def test_finds_the_ranks_of_both_kinds_of_collectives() -> None:
    found = []

    def watch(func: Any, args: Any, kwargs: Any, _: Any) -> None:
        if "allreduce_" in str(func) or "all_reduce" in str(func):
            found.append(ranks_of_collective(func, args, kwargs))

    with fake_rank(2, 4):
        group = dist.new_group([0, 2])
        with without_values(watch):
            dist.all_reduce(torch.ones(3), group=group)
            torch.ops._c10d_functional.all_reduce(torch.ones(3), "sum", group.group_name)
    assert found == [[0, 2], [0, 2]]


def test_counts_the_larger_end_and_no_group_of_one() -> None:
    ledger, mesh = TrafficLedger(), MeshShape(dp_shard=2, tp=2)
    reduce_scatter = torch.ops._c10d_functional.reduce_scatter_tensor
    all_gather = torch.ops._c10d_functional.all_gather_into_tensor
    with fake_rank(0, 4):
        alone, shards, everyone = (dist.new_group(ranks) for ranks in ([0], [0, 2], [0, 1, 2, 3]))
        with without_values(TrafficCounter(ledger, mesh)):
            dist.all_reduce(torch.ones(3), group=alone)
            reduce_scatter(torch.ones(6), "sum", 2, shards.group_name)
            all_gather(torch.ones(3), 4, everyone.group_name)
    assert ledger.traffic == (
        Traffic(MessageKind.ALL_GATHER, ("dp_shard", "tp"), 1, 48),
        Traffic(MessageKind.REDUCE_SCATTER, ("dp_shard",), 1, 24),
    )
