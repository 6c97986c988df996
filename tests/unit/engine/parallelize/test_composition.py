"""What becomes of a module's parts when it is made parallel, on ranks that do not exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dist.engine.common.device_mesh import build_mesh
from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.parallelize.composition import ParallelModule, parallelize
from lightning_dist.engine.parallelize.parallelism import Parallelism
from lightning_dist.engine.parallelize.shard_config import ShardConfig
from lightning_dist.engine.sharding.fully_shard import ShardingOptions
from lightning_dist.engine.sharding.wrap import AnyOf, ByClass, ByName
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from lightning_dist.strategies.mesh_runtime.dry.fake_ranks import fake_rank
from recipes.gpt import GPT

SIZE, DEPTH = 4, 8


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Block(nn.Module):
    """Its matrix product and its tangent are the inner one's, its sigmoid its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.inner(x))


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Block() for _ in range(DEPTH)))


@contextmanager
def made(
    shape: MeshShape, rank: int, shard: ShardConfig, schedule: Any = "1f1b"
) -> Iterator[ParallelModule]:
    with fake_rank(rank, shape.world_size):
        config = PipelineConfig(schedule, partition="uniform")
        asked = Parallelism(
            config if shape.pp > 1 else None, TensorConfig(), shard, shard.options(None)
        )
        yield parallelize(Module(), build_mesh(shape, "cpu"), asked)


class WithTeacher(Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(*(Block() for _ in range(DEPTH))).requires_grad_(False)


@pytest.mark.parametrize(
    "policy", [None, ByClass(["Block"]), ByName(["model.*.inner"])], ids=["auto", "class", "name"]
)
def test_units_beside_what_is_pipelined_stay_whole(policy: Any) -> None:
    shard = ShardConfig() if policy is None else ShardConfig(wrap=policy)
    with fake_rank(0, 4):
        asked = Parallelism(
            PipelineConfig(partition="uniform"), TensorConfig(), shard, shard.options(None)
        )
        mesh = build_mesh(MeshShape(pp=2, dp_shard=2), "cpu")
        composed = parallelize(WithTeacher(), mesh, asked)
        kept = {name for name, p in composed.module.named_parameters() if isinstance(p, DTensor)}
    assert len(composed.units) == DEPTH // 2
    assert all(name.startswith("model.") for name in (*composed.units, *kept))


class WithHead(Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(SIZE, SIZE)


@pytest.mark.parametrize("rank", [0, 3])
def test_what_steps_use_behind_the_stages_stays_whole(rank: int) -> None:
    shard = ShardConfig()
    with fake_rank(rank, 4):
        asked = Parallelism(PipelineConfig(), TensorConfig(), shard, shard.options(None))
        mesh = build_mesh(MeshShape(pp=2, dp_shard=2), "cpu")
        named = dict(parallelize(WithHead(), mesh, asked).module.named_parameters())
    assert ("head.weight" in named) == (rank == 3)
    whole = {name for name, p in named.items() if not isinstance(p, DTensor)}
    assert whole == {name for name in named if name.startswith("head.")}


class WithForward(WithHead):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.model(x))


def test_a_forward_may_have_a_head_behind_the_stages() -> None:
    with fake_rank(0, 2):
        asked = Parallelism(PipelineConfig(), TensorConfig(), ShardConfig())
        split = parallelize(WithForward(), build_mesh(MeshShape(pp=2), "cpu"), asked).split
    assert split is not None
    assert (split.path, split.layers.loss_parameters.names) == (
        "model",
        {"head.weight", "head.bias"},
    )


def test_a_plan_may_not_cut_it_where_there_are_shards() -> None:
    shard, plan = (
        ShardConfig(),
        {"model.*.inner.linear": "colwise_gather", "head": "colwise_gather"},
    )
    asked = Parallelism(PipelineConfig(), TensorConfig(plan), shard, shard.options(None))
    with fake_rank(0, 4):
        parallelize(WithHead(), build_mesh(MeshShape(pp=2, tp=2), "cpu"), asked)
    refused = pytest.raises(ValueError, match=r"^Leave \['head.bias', 'head.weight'\] out of the")
    with fake_rank(0, 8), refused:
        parallelize(WithHead(), build_mesh(MeshShape(pp=2, dp_shard=2, tp=2), "cpu"), asked)


def test_a_unit_that_stages_would_divide_is_refused() -> None:
    shard = ShardConfig(wrap=ByName(["model"]))
    refused = pytest.raises(ValueError, match=r"selects \['model'\], which are no part")
    with fake_rank(0, 4), refused:
        asked = Parallelism(PipelineConfig(), TensorConfig(), shard, shard.options(None))
        parallelize(WithTeacher(), build_mesh(MeshShape(pp=2, dp_shard=2), "cpu"), asked)


class Spread(L.LightningModule):
    """Has an MLP, and a layer that is replicated."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(SIZE, 2 * SIZE), nn.GELU(), nn.Linear(2 * SIZE, SIZE))
        self.other = nn.Linear(SIZE, 3, bias=False)


@pytest.mark.parametrize("shape", [MeshShape(tp=2), MeshShape(dp_shard=2, tp=2)])
def test_a_plan_that_was_found_says_why_a_part_is_replicated(shape: MeshShape) -> None:
    with fake_rank(0, shape.world_size):
        shard = ShardConfig()
        asked = Parallelism(None, TensorConfig(), shard, shard.options(None))
        words = parallelize(Spread(), build_mesh(shape, "cpu"), asked).plan
        own = TensorConfig({"mlp.0": "colwise", "mlp.2": "rowwise"})
        asked = Parallelism(None, own, shard, shard.options(None))
        assert parallelize(Spread(), build_mesh(shape, "cpu"), asked).plan is None
    assert words is not None
    (sharded,), (replicated,) = words.sharded, words.replicated
    assert sharded == "mlp: mlp.* (colwise), mlp.* (rowwise)"
    assert replicated.startswith(
        "replicated: other (14% of the parameters): no other layer by whose name"
    )


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def forward(composed: ParallelModule) -> Tensor:
    x = torch.ones(1, SIZE, requires_grad=True)
    (root,) = composed.roots
    if composed.split is not None:  # it is what runs a stage's layers
        return root(x)
    return root(composed.module.model, x)


def operations(composed: ParallelModule) -> Counter[str]:
    """Counts what a forward and a backward of this rank compute."""
    with Counting() as counting:
        forward(composed).sum().backward()
    return counting.counts


NESTED = AnyOf([ByClass(["Inner"]), ByClass(["Block"])])


@pytest.mark.parametrize(
    ("shard", "products", "tangents", "sigmoids"),
    [
        (ShardConfig(), 1, 1, 1),
        (ShardConfig(activation_checkpointing="full"), 2, 2, 2),
        (ShardConfig(activation_checkpointing="selective"), 1, 2, 2),
        (ShardConfig(activation_checkpointing=["Inner"]), 2, 2, 1),
        (ShardConfig(wrap=NESTED, activation_checkpointing="full"), 2, 2, 2),
        (ShardConfig(wrap=NESTED, activation_checkpointing="selective"), 1, 2, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [MeshShape(), MeshShape(pp=2)], ids=["whole", "staged"])
def test_what_was_asked_for_is_computed_again(
    shape: MeshShape, shard: ShardConfig, products: int, tangents: int, sigmoids: int
) -> None:
    for rank in range(shape.world_size):
        with made(shape, rank, shard) as composed:
            counts = operations(composed)
        num_blocks = DEPTH // shape.pp
        found = [counts[name] for name in ("addmm", "tanh", "sigmoid")]
        assert found == [num_blocks * times for times in (products, tangents, sigmoids)]


def test_an_error_of_the_wrap_policy_shows_what_the_user_has_written() -> None:
    class Tied(Module):
        def __init__(self) -> None:
            super().__init__()
            self.model[3].inner = self.model[1].inner

    policy = ByName(["model.1", "model.3"])
    asked = Parallelism(None, TensorConfig(), ShardConfig(wrap=policy), ShardingOptions())
    with (
        fake_rank(0, 2),
        pytest.raises(ValueError, match=r"^ByName\(patterns=\['model.1', 'model.3'\]\) puts the"),
    ):
        parallelize(Tied(), build_mesh(MeshShape(dp_shard=2), "cpu"), asked)


@pytest.mark.parametrize(("rank", "own"), [(0, range(0, 4)), (2, range(4, 8))])
def test_a_stage_has_units_of_its_own_layers(rank: int, own: range) -> None:
    with made(MeshShape(pp=2, dp_shard=2), rank, ShardConfig(wrap=ByClass(["Inner"]))) as composed:
        names = [f"model.{layer}.inner" for layer in own]
        assert composed.units == names
        parts = composed.module.named_modules()
        assert [name for name, part in parts if isinstance(part, FSDPModule)] == names
        assert composed.shards == composed.roots


def test_each_stage_of_a_rank_is_sharded_by_itself() -> None:
    shard = ShardConfig(wrap=ByClass(["Inner"]))
    with made(MeshShape(pp=2, dp_shard=2), 0, shard, "zbv") as composed:
        first, last = composed.shards
        assert composed.shards == composed.roots
        assert [list(dict(root.named_children())) for root in (first, last)] == [
            ["0", "1"],
            ["6", "7"],
        ]


def test_what_crosses_from_stage_to_stage_is_not_cut() -> None:
    width, tokens = 8, torch.zeros(1, 4, dtype=torch.int64)
    with fake_rank(0, 4):
        pipeline = PipelineConfig("interleaved_1f1b", partition="uniform")
        tensor, shard = TensorConfig(sequence_parallel=True), ShardConfig()
        asked = Parallelism(pipeline, tensor, shard, shard.options(None))
        module = GPT(width=width, depth=6, num_heads=2)
        first, third = parallelize(module, build_mesh(MeshShape(pp=2, tp=2), "cpu"), asked).roots
        for root in (first, third):
            tokens = root(tokens)
            assert tokens.shape == (1, 4, width)


@pytest.mark.parametrize(
    ("shape", "asked", "num_whole"),
    [
        (MeshShape(dp_shard=2), "auto", 2),
        (MeshShape(dp_shard=2), False, DEPTH),
        (MeshShape(pp=2, dp_shard=2), "auto", DEPTH // 2),
        (MeshShape(pp=2, dp_shard=2), True, 2),
    ],
)
def test_blocks_of_a_stage_stay_whole_unless_told_otherwise(
    shape: MeshShape, asked: Any, num_whole: int
) -> None:
    with made(shape, 0, ShardConfig(reshard_after_forward=asked)) as composed:
        block_bytes = (SIZE + 1) * SIZE * 4
        assert composed.summary.peak_whole_bytes == num_whole * block_bytes
        forward(composed)
        blocks = composed.module.model[: DEPTH // shape.pp]
        freed = [isinstance(block.inner.linear.weight, DTensor) for block in blocks]
        assert freed == [num_whole == 2] * len(blocks)


FIRST = ByName(["model.0"])


@pytest.mark.parametrize(
    ("shape", "rank", "wrap", "compiled"),
    [
        (MeshShape(dp_shard=2), 0, "auto", ["Block"] * DEPTH),
        (MeshShape(dp_shard=2), 0, NESTED, ["Inner"] * DEPTH),
        (MeshShape(pp=2), 0, FIRST, ["Block"]),
        (MeshShape(pp=2), 1, FIRST, ["Sequential"]),  # what runs the stage that has no unit
    ],
)
def test_what_is_compiled(
    shape: MeshShape, rank: int, wrap: Any, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []

    def note(forward: Any) -> Any:
        found.append(type(forward.__self__).__name__)
        return forward

    monkeypatch.setattr(torch, "compile", note)
    with made(shape, rank, ShardConfig(wrap=wrap, compile=True)):
        assert found == compiled
