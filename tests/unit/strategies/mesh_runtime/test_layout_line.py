from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.data_parallel.ddp_options import Compression, GradientExchange
from lightning_dist.engine.data_parallel.local_config import LocalConfig
from lightning_dist.engine.sharding.fully_shard import ShardingOptions
from lightning_dist.engine.sharding.wrap import Unit
from lightning_dist.engine.sharding.wrap_summary import describe
from lightning_dist.strategies.mesh_runtime.layout_line import (
    describe_layout,
    describe_replicas,
    describe_shards,
    describe_tensor,
)


def shards(options: ShardingOptions, *reshard: bool | int | None, is_manual: bool = False) -> str:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Conv1d(1, 1, 1))
    units = [Unit(f"{index}", chosen) for index, chosen in enumerate(reshard)]
    return describe_shards(describe(model, units), options, is_manual=is_manual)


@pytest.mark.parametrize(
    ("default", "own", "said"),
    [
        (None, (None, None, None), ""),
        (True, (None, None, None), ", resharded after forward"),
        (False, (None, None, None), ", gathered until backward"),
        (2, (None, None, None), ", resharded to 2 ranks after forward"),
        (
            None,
            (None, False, 2),
            ", resharded after forward x1, gathered until backward x2,"
            " resharded to 2 ranks after forward x1",
        ),
    ],
)
def test_what_stays_gathered_is_told(
    default: bool | int | None, own: tuple[bool | int | None, ...], said: str
) -> None:
    line = shards(ShardingOptions(default), *own)
    assert line == f"units Linear x2, Conv1d x1 and the root{said}"


def test_a_model_without_units_is_one() -> None:
    assert shards(ShardingOptions()) == "the root is the only unit"


def test_what_the_user_has_sharded_is_not_guessed_at() -> None:
    line = shards(ShardingOptions(False), None, is_manual=True)
    assert line == "units Linear x1 and the root, as configure_model has sharded them"


def test_one_line_says_how_a_mesh_spreads_a_model() -> None:
    half = ShardingOptions(None, torch.bfloat16, torch.float32, offload=False)
    parts = [describe_tensor(8, 195, 200), shards(half, None, None, None)]
    line = describe_layout(MeshShape(dp_replicate=2, dp_shard=2, tp=2), parts)
    assert line == (
        "Mesh of 8 ranks, dp_replicate=2 x dp_shard=2 x tp=2: 8 layers with 98% of the parameters"
        " cut; units Linear x2, Conv1d x1 and the root, bfloat16 with float32 gradients;"
        " 4 batches a step."
    )


@pytest.mark.parametrize(
    ("mesh", "line"),
    [
        (MeshShape(), "One rank holds the whole model."),
        (MeshShape(dp_shard=2), "FSDP: shards on 2 ranks: x; 2 batches a step."),
        (
            MeshShape(dp_replicate=2, dp_shard=2),
            "FSDP: shards on 2 ranks, 2 replicas: x; 4 batches a step.",
        ),
        (MeshShape(tp=4), "Tensor parallelism on 4 ranks: x; 1 batch a step."),
        (MeshShape(pp=2, tp=2), "Mesh of 4 ranks, pp=2 x tp=2, rank 0: x; 1 batch a step."),
    ],
)
def test_the_line_begins_with_the_mesh(mesh: MeshShape, line: str) -> None:
    assert describe_layout(mesh, ["x"]) == line


def test_replicas_are_whole_on_each_rank() -> None:
    line = describe_layout(MeshShape(dp_replicate=2), [])
    assert (
        line == "Mesh of 2 ranks, dp_replicate=2: the whole model on each rank; 2 batches a step."
    )


def exchange_of(compression: Compression, *, overlap: bool) -> GradientExchange:
    return GradientExchange(
        compression=compression,
        topk_fraction=0.01,
        powersgd_rank=2,
        powersgd_start_step=0,
        overlap=overlap,
        bucket_megabytes=25.0,
        static_graph=False,
        find_unused_parameters=False,
    )


@pytest.mark.parametrize(
    ("exchange", "every", "said"),
    [
        (
            exchange_of("none", overlap=True),
            1,
            "gradients averaged in buckets of 25 MB during the backward",
        ),
        (
            exchange_of("bf16", overlap=False),
            1,
            "gradients averaged as bf16 behind the backward",
        ),
        (
            exchange_of("none", overlap=False),
            4,
            "weights averaged every 4 updates behind 10 updates with gradients averaged behind the"
            " backward",
        ),
    ],
)
def test_one_line_says_how_replicas_train(
    exchange: GradientExchange, every: int, said: str
) -> None:
    line = describe_replicas(MeshShape(dp_replicate=2), 8673, exchange, LocalConfig(every, 10))
    assert line == f"DDP: 2 replicas of 8.67 K parameters; {said}; 2 batches a step."


def test_a_replica_alone_has_none_to_average_with() -> None:
    exchange = exchange_of("none", overlap=True)
    line = describe_replicas(MeshShape(), 8673, exchange, LocalConfig())
    assert line == "One rank holds the whole model."
