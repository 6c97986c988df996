"""FSDP2 reduces the gradients of a backward in parts as it does those of a whole one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_dist.engine.pipeline.fsdp_gradients import ParamGradAccumulator
from lightning_dist.engine.pipeline.split_backward import SplitBackward
from lightning_dist.engine.sharding.fully_shard import ShardingOptions, shard
from lightning_dist.engine.sharding.wrap import Unit
from lightning_dist.strategies.mesh_runtime.dry.fake_ranks import fake_rank

BF16, FP32 = torch.bfloat16, torch.float32
SIZE = 4
INPUTS = (256.0, 1.0, 1.0)  # 256 and 1 are 256 in bf16


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_rank(0, 2):
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What each reduce-scatter is given; nobody else adds to it."""
    found: list[Tensor] = []
    names = ("reduce_scatter_single", "reduce_scatter_tensor")
    name = next(name for name in names if hasattr(torch.distributed, name))
    original = getattr(torch.distributed, name)

    def note(*args: Any, input: Tensor, **kwargs: Any) -> Any:
        found.append(input.clone())
        return original(*args, input=input, **kwargs)

    monkeypatch.setattr(torch.distributed, name, note)
    return found


class Fork(nn.Module):
    """Autograd gives both biases one tensor, and no gradient depends on a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(SIZE, SIZE, bias=False)
        self.right = nn.Linear(SIZE, SIZE, bias=False)
        self.first_bias = nn.Parameter(torch.ones(1, SIZE))
        self.second_bias = nn.Parameter(torch.ones(1, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.left.weight.dtype)  # as whoever runs the step sees to it
        return self.left(x) + self.right(x) + (self.first_bias + self.second_bias)


def sharded(mesh: DeviceMesh, **options: Any) -> Fork:
    stage = Fork()
    shard([stage], stage, [Unit("right")], mesh, ShardingOptions(**options))
    return stage


def run_round(stage: Fork, gradients: ParamGradAccumulator) -> None:
    """Runs all micro-batches forward, then their inputs' parts, then their weights'."""
    gradients.begin_round(len(INPUTS))
    inputs = [torch.full((1, SIZE), value, requires_grad=True) for value in INPUTS]
    outputs = [stage(x) for x in inputs]
    parts: list[SplitBackward] = []
    for x, y in zip(inputs, outputs, strict=True):
        with gradients.input_backward({}) as parameters:
            parts.append(SplitBackward([y], [torch.ones_like(y)], [x], parameters))
            assert parts[-1].run_inputs()[0] is not None
    for parted in parts:
        with gradients.adding({}, parted.given, 0):
            parted.run_weights()
    gradients.end_round()


def assert_sums(sent: list[Tensor], num_rounds: int) -> None:
    """Compares what travels: each row of a weight has all inputs, each bias has their number."""
    weight = num_rounds * SIZE * SIZE * sum(INPUTS)
    biases = num_rounds * 2 * SIZE * len(INPUTS)
    assert [unit.dtype for unit in sent] == [FP32, FP32]
    assert [unit.sum() for unit in sent] == [weight + biases, weight]


@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("options", [{}, {"param_dtype": BF16, "reduce_dtype": FP32}])
def test_once_a_round_and_summed_in_the_dtype_that_travels(
    mesh: DeviceMesh, sent: list[Tensor], options: dict[str, Any], reshard: bool
) -> None:
    stage = sharded(mesh, reshard_after_forward=reshard, **options)
    gradients = ParamGradAccumulator(stage)
    run_round(stage, gradients)
    assert_sums(sent, 1)
    held = gradients.take(0)
    assert held.keys() == {"left.weight", "right.weight", "first_bias", "second_bias"}
    assert all(isinstance(gradient, DTensor) for gradient in held.values())
    assert all(isinstance(parameter, DTensor) for parameter in stage.parameters())


def test_a_round_that_sends_nothing_is_summed_with_the_next(
    mesh: DeviceMesh, sent: list[Tensor]
) -> None:
    stage, sends = sharded(mesh, reshard_after_forward=False), [False]
    gradients = ParamGradAccumulator(stage, sends=lambda: sends[-1])
    run_round(stage, gradients)
    assert sent == []
    assert gradients.take(0) == {}
    sends.append(True)
    run_round(stage, gradients)
    assert_sums(sent, 2)
