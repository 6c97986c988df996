"""What forwards write into gathered weights is in the shards, copied once for a round of them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_dist.engine.pipeline.fsdp_gradients import ParamGradAccumulator
from lightning_dist.engine.sharding.fully_shard import ShardingOptions, reshard, shard
from lightning_dist.engine.sharding.wrap import Unit
from lightning_dist.engine.sharding.written_weights import WrittenWeights
from lightning_dist.engine.tensors.dtensor import local_part
from lightning_dist.strategies.mesh_runtime.dry.fake_ranks import fake_rank

SIZE = 4
NUM_MICROBATCHES = 3
ROUNDED = 1.0 + 2.0**-20  # no number of half precision


class Halving(nn.Module):
    """Halves its weight in each forward, if it writes at all."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.full((SIZE, SIZE), ROUNDED))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.way == "in place":
                self.weight.mul_(0.5)
            elif self.way == "anew":
                self.weight.data = self.weight.data * 0.5
        return x.to(self.weight.dtype) @ self.weight.clone().T  # a backward needs what it was


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_rank(0, 2):
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of weights that each copy to shards has."""
    found: list[int] = []
    original = torch._foreach_copy_

    def note(shards: Any, parts: Any) -> None:
        if shards[0].ndim == 2:  # else it is FSDP2 that gathers
            found.append(len(shards))
        original(shards, parts)

    monkeypatch.setattr(torch, "_foreach_copy_", note)
    return found


def run_rounds(stage: nn.Module, count: int) -> WrittenWeights:
    """Runs all forwards of each round, then the backwards."""
    written = WrittenWeights([stage], in_rounds=True)  # type: ignore[list-item]
    gradients = ParamGradAccumulator(stage, before_last=written.keep)
    for _ in range(count):
        written.begin_round()
        gradients.begin_round(NUM_MICROBATCHES)
        outputs = [stage(torch.ones(1, SIZE)) for _ in range(NUM_MICROBATCHES)]
        for output in outputs:
            gradients.run([output], [torch.ones_like(output)], [], {}, 0)
        gradients.end_round()
    return written


def sharded(mesh: DeviceMesh, way: str, **options: Any) -> nn.Module:
    stage = nn.Sequential(Halving(way), Halving(way))
    shard([stage], stage, [Unit("1")], mesh, ShardingOptions(**options))
    return stage


def values(stage: nn.Module) -> list[float]:
    own = [local_part(p.detach()) for p in stage.parameters()]
    return [float(value) for shard in own for value in shard.flatten()]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("way", ["in place", "anew"])
def test_what_all_forwards_of_a_round_write_is_copied_once(
    mesh: DeviceMesh, copies: list[int], way: str, dtype: torch.dtype | None
) -> None:
    stage = sharded(mesh, way, reshard_after_forward=False, param_dtype=dtype)
    run_rounds(stage, 2)
    found = {value * 2.0 ** (2 * NUM_MICROBATCHES) for value in values(stage)}
    assert found == {ROUNDED if dtype is None else 1.0}
    assert len(copies) == 4  # two units, two rounds


def test_units_that_forwards_free_are_copied_after_each(
    mesh: DeviceMesh, copies: list[int]
) -> None:
    stage = sharded(mesh, "in place", reshard_after_forward=True)
    run_rounds(stage, 1)
    assert {v * 2.0**NUM_MICROBATCHES for v in values(stage)} == {ROUNDED}
    assert len(copies) >= 2 * NUM_MICROBATCHES


def test_masters_keep_what_half_precision_has_not(mesh: DeviceMesh, copies: list[int]) -> None:
    stage = sharded(mesh, "no", reshard_after_forward=False, param_dtype=torch.bfloat16)
    run_rounds(stage, 2)
    assert set(values(stage)) == {ROUNDED}
    assert copies == []


def test_a_forward_without_a_backward_waits_for_whoever_frees(mesh: DeviceMesh) -> None:
    stage = sharded(mesh, "in place", reshard_after_forward=False)
    written = run_rounds(stage, 1)
    stage(torch.ones(1, SIZE))
    written.keep_waiting()
    reshard(stage)
    assert {v * 2.0 ** (NUM_MICROBATCHES + 1) for v in values(stage)} == {ROUNDED}


def test_a_round_that_has_failed_is_forgotten(mesh: DeviceMesh, copies: list[int]) -> None:
    stage = sharded(mesh, "in place", reshard_after_forward=False)
    written = run_rounds(stage, 0)
    stage(torch.ones(1, SIZE))
    written.begin_round()
    written.keep_waiting()
    assert copies == []


def test_gathers_of_the_backward_wait_for_the_copies(mesh: DeviceMesh) -> None:
    stage: Any = sharded(mesh, "in place", reshard_after_forward=True)
    written = WrittenWeights([stage])
    written.keep()  # before the first forward there is nothing to wait for
    stage(torch.ones(1, SIZE))
    comms = stage._get_fsdp_state()._comm_ctx
    waits: list[Any] = []
    comms.all_gather_copy_in_stream = SimpleNamespace(wait_stream=waits.append)
    written.keep()
    assert waits == [torch.cpu.current_stream()]
