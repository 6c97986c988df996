"""How the stages of a model are found: by names, by forwards, or by a trace."""

from __future__ import annotations

from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_dist.engine.common.device_mesh import build_mesh
from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.parallelize.composition import parallelize
from lightning_dist.engine.parallelize.parallelism import Parallelism
from lightning_dist.engine.parallelize.shard_config import ShardConfig
from lightning_dist.engine.precision.policy import HalfPrecision
from lightning_dist.engine.sharding.wrap import ByClass
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.splitting.tracing.example import Arguments, CallExample
from lightning_dist.engine.tensors.dtensor import is_dtensor
from lightning_dist.strategies.mesh_runtime.dry.fake_ranks import fake_rank

SIZE = 4
SHARDS = MeshShape(pp=2, dp_shard=2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Skips(nn.Module):
    """No sequence: the first block's output goes into the last one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = Block(), Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        return self.last(self.middle(first) + first)


class WithSkips(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Skips()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def traced(**asked: Any) -> Parallelism:
    example = CallExample(torch.zeros(3, SIZE), lambda: True, observe_nothing)
    return Parallelism(PipelineConfig(), example=example, **asked)


def observe_nothing(traced: nn.Module, path: str) -> Arguments:
    raise AssertionError(f"{path} has an example, or is not traced")


@pytest.mark.parametrize(
    ("what", "shape", "asked"),
    [
        ("tp", MeshShape(pp=2, tp=2), {}),
        ("compile", SHARDS, {"shard": ShardConfig(compile=True)}),
        (
            "activation_checkpointing",
            SHARDS,
            {"shard": ShardConfig(activation_checkpointing="full")},
        ),
        ("wrap", SHARDS, {"shard": ShardConfig(wrap=ByClass(["Block"]))}),
        ("MixedPrecision with shards", SHARDS, {"half": HalfPrecision(torch.bfloat16)}),
        ("sync_batchnorm", SHARDS, {"joint_statistics": ["model.norm"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_go_with_a_trace(what: str, shape: MeshShape, asked: dict[str, Any]) -> None:
    with fake_rank(0, 4), pytest.raises(ValueError, match=f"^{what}: this model has to be traced"):
        parallelize(WithSkips(), build_mesh(shape, "cpu"), traced(**asked))


def test_without_an_example_no_model_is_traced() -> None:
    with (
        fake_rank(0, 4),
        pytest.raises(ValueError, match=r"^Use a strategy with 2 stages"),
    ):
        parallelize(WithSkips(), build_mesh(SHARDS, "cpu"), Parallelism(PipelineConfig()))


@pytest.mark.parametrize("rank", [0, 2])
def test_shards_of_a_trace_are_those_of_the_module(rank: int) -> None:
    """While a stage is gathered the user's module has the gathered parameters, too."""
    own = {0: "first", 2: "last"}[rank]
    with fake_rank(rank, 4):
        module = WithSkips()
        composed = parallelize(module, build_mesh(SHARDS, "cpu"), traced())
        (root,) = composed.shards
        held = {id(p) for p in composed.roots[0].parameters()}
        assert {id(p) for p in module.parameters()} == held
        assert {name.split(".")[1] for name, _ in module.named_parameters()} >= {own}
        assert all(is_dtensor(p) for p in module.parameters())
        assert "mirror" not in dict(composed.roots[0].named_children())

        root.unshard()
        weight = module.get_parameter(f"model.{own}.linear.weight")
        assert not isinstance(weight, DTensor)
        assert id(weight) in {id(p) for p in composed.roots[0].parameters()}
        root.reshard()
        assert isinstance(module.get_parameter(f"model.{own}.linear.weight"), DTensor)


def test_parameters_that_replace_others_reach_the_stage() -> None:
    with fake_rank(0, 4):
        module = WithSkips()
        composed = parallelize(module, build_mesh(SHARDS, "cpu"), traced())
        assert composed.split is not None
        made = nn.Parameter(module.model.first.linear.weight.detach().clone())
        module.model.first.linear.weight = made
        composed.split.layers.take_replaced()
        assert id(made) in {id(p) for p in composed.roots[0].parameters()}


class Towers(nn.Module):
    """Two lists of blocks, as a Hugging Face model has them, and an embedding before each."""

    config = None
    pp_plan: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, SIZE)
        self.left = nn.ModuleList(Block() for _ in range(2))
        self.right = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.left:
            hidden = block(hidden)
        hidden = hidden + self.embed(tokens)
        for block in self.right:
            hidden = block(hidden)
        return hidden @ self.embed.weight.T


class WithTowers(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Towers()
        self.example_input_array = torch.arange(4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)


def test_lists_of_blocks_are_named_first_where_a_trace_fails() -> None:
    module = WithTowers()
    example = CallExample(module.example_input_array, lambda: True, observe_nothing)
    asked = Parallelism(PipelineConfig(), shard=None, example=example)
    expected = r"^Pass layers='model.left' or .* Tracing it failed, too: .* finds too few layers"
    with fake_rank(0, 2), pytest.raises(ValueError, match=expected):
        parallelize(module, build_mesh(MeshShape(pp=2), "cpu"), asked)
