"""The strategies of the package that must give what a single device gives: one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lightning.pytorch.strategies import Strategy

from lightning_dist import (
    AutoStrategy,
    DDPStrategy,
    FSDPStrategy,
    MeshStrategy,
    OuterOptimizer,
    ParameterServerStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensor_parallel.config import TensorConfig


@dataclass(frozen=True)
class Entry:
    """A strategy on some processes."""

    devices: int
    replicas: int
    make: Callable[[], Strategy]
    is_typical: bool = (
        False  # whether it goes through the long tests, of hooks, logs and tasks, too
    )
    averages_behind_hooks: bool = False  # whether a rank sees, and clips, its own gradient


PLAN = {"model.*.linear": "colwise_gather"}
# Of the micro-batches that a mesh with stages would choose, each costs many operations on shards.
HALVES, THIRDS = PipelineConfig(num_microbatches=2), PipelineConfig(num_microbatches=3)

ENTRIES: dict[str, Entry] = {
    "pipeline-gpipe-2": Entry(
        2, 1, partial(PipelineStrategy, schedule="gpipe", num_microbatches=3), is_typical=True
    ),
    "pipeline-1f1b-4": Entry(
        4, 1, partial(PipelineStrategy, schedule="1f1b", partition=[1, 1, 1, 2])
    ),
    "pipeline-2x2": Entry(4, 2, partial(PipelineStrategy, num_stages=2)),
    "ddp-2": Entry(2, 2, DDPStrategy, is_typical=True),
    "ddp-4": Entry(4, 4, DDPStrategy),
    "ddp-2-static": Entry(2, 2, partial(DDPStrategy, static_graph=True)),
    "ddp-2-buckets": Entry(2, 2, partial(DDPStrategy, bucket_megabytes=0.001)),
    "ddp-2-topk": Entry(2, 2, partial(DDPStrategy, compression="topk", topk_fraction=1.0)),
    # Replicas that step by themselves train otherwise: theirs is an endless warm-up.
    "ddp-2-diloco": Entry(
        2, 2, partial(DDPStrategy, sync_every=4, outer=OuterOptimizer(), sync_warmup_steps=1000)
    ),
    "server-2": Entry(
        2, 2, partial(ParameterServerStrategy, num_servers=2), averages_behind_hooks=True
    ),
    "fsdp-2": Entry(2, 2, FSDPStrategy, is_typical=True),
    "fsdp-4": Entry(4, 4, partial(FSDPStrategy, shard="optimizer")),
    "fsdp-2x2": Entry(4, 4, partial(FSDPStrategy, shard_size=2)),
    "fsdp-2-microsteps": Entry(2, 2, partial(FSDPStrategy, shard="gradients")),
    "fsdp-2-recompute": Entry(2, 2, partial(FSDPStrategy, activation_checkpointing="full")),
    "tp-2": Entry(2, 1, partial(TensorParallelStrategy, plan=PLAN), is_typical=True),
    "shard-2-tp-2": Entry(4, 2, partial(MeshStrategy, tp=2, tensor=TensorConfig(plan=PLAN))),
    "pp-2-shard-2": Entry(4, 2, partial(MeshStrategy, pp=2, pipeline=HALVES), is_typical=True),
    "replicate-2": Entry(2, 2, partial(MeshStrategy, dp_replicate=2)),
    "pp-2-replicate-2": Entry(4, 2, partial(MeshStrategy, pp=2, dp_replicate=2, dp_shard=1)),
    "pp-2-tp-2": Entry(
        4, 1, partial(MeshStrategy, pp=2, tp=2, tensor=TensorConfig(plan=PLAN), pipeline=THIRDS)
    ),
    "auto-2": Entry(2, 2, partial(AutoStrategy, replicas=2)),
    "tp-2x2": Entry(4, 2, partial(TensorParallelStrategy, tp_size=2, plan=PLAN)),
}

TYPICAL = [name for name, entry in ENTRIES.items() if entry.is_typical]

# Too costly for all tests.
EIGHT: dict[str, Entry] = {
    "pp-2-shard-2-tp-2": Entry(
        8,
        2,
        partial(
            MeshStrategy,
            pp=2,
            dp_shard=2,
            tp=2,
            tensor=TensorConfig(plan=PLAN),
            pipeline=HALVES,
        ),
    ),
}
