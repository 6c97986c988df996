"""Meshes on which the recipe's GPT must be a single device's: each product of axes, and more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

from lightning_dist import MeshStrategy
from lightning_dist.engine.parallelize.shard_config import ShardConfig
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from tests.helpers.gpt_parity import BATCH_SIZE, NUM_SAMPLES, Fitted, fit


@dataclass(frozen=True)
class Case:
    """A mesh, and what is special about it.

    Attributes:
        sizes: By axis.
        tensor: Dials of tensor parallelism.
        shard: Dials of the shards.
        schedule: Of the pipeline.
        num_microbatches: Of the pipeline.
        accumulate: Batches for an update.
        num_samples: Of an epoch; batches have four.
    """

    sizes: dict[str, int]
    tensor: dict[str, Any] = field(default_factory=dict)
    shard: dict[str, Any] = field(default_factory=dict)
    schedule: Any = "1f1b"
    num_microbatches: Any = 2
    accumulate: int = 1
    num_samples: int = NUM_SAMPLES

    @property
    def devices(self) -> int:
        return prod(self.sizes.values())

    @property
    def replicas(self) -> int:
        return self.sizes.get("dp_replicate", 1) * self.sizes.get("dp_shard", 1)

    @property
    def strategy(self) -> MeshStrategy:
        return MeshStrategy(
            **{"dp_shard": 1, **self.sizes},
            pipeline=PipelineConfig(self.schedule, self.num_microbatches),
            tensor=TensorConfig(**self.tensor),
            shard=ShardConfig(**self.shard),
        )

    def fit(self) -> Fitted:
        return fit(
            self.devices, self.strategy, self.num_samples, accumulate_grad_batches=self.accumulate
        )


AXES = {"pp": "stages", "dp_replicate": "replicas", "dp_shard": "shards", "tp": "tensor ranks"}
TENSOR_DIALS = {
    "": {},
    ", sequence": {"sequence_parallel": True},
    ", loss": {"loss_parallel": True},
    ", both": {"sequence_parallel": True, "loss_parallel": True},
}

# By replicas: the last batch has 3, 2 or 4 samples; four replicas cannot share out fewer.
UNEVEN_SAMPLES = {1: 35, 2: 34, 4: 36}


def products(devices: int) -> Iterator[dict[str, int]]:
    """Gives the sizes of all meshes of so many ranks, without axes of one."""
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    for sizes in product(divisors, repeat=len(AXES)):
        if prod(sizes) == devices:
            named = zip(AXES, sizes, strict=True)
            yield {axis: size for axis, size in named if size > 1}


def name_of(sizes: dict[str, int]) -> str:
    return " x ".join(f"{size} {AXES[axis]}" for axis, size in sizes.items())


def accumulated(case: Case) -> Case:
    """Makes a mesh's case with two batches to an update, fewer and smaller ones for the last."""
    # A replica's last batch may have fewer samples than micro-batches.
    return replace(
        case, num_microbatches=2, accumulate=2, num_samples=UNEVEN_SAMPLES[case.replicas]
    )


def cases_of_products() -> Iterator[tuple[str, Case]]:
    """Gives each product of axes on 2 and on 4 ranks, with each dial of tensor parallelism.

    Those with tensor ranks cost most: of each two dials one is tried with accumulation.
    """
    for sizes in (*products(2), *products(4)):
        name, case = name_of(sizes), Case(sizes)
        if "tp" not in sizes:
            yield name, case
            yield f"{name}, accumulated", accumulated(case)
            continue
        for dials, tensor in TENSOR_DIALS.items():
            sharded = replace(case, tensor=tensor)
            if dials in ("", ", both"):
                yield f"{name}{dials}", sharded
            else:
                yield f"{name}{dials}, accumulated", accumulated(sharded)


FULL = {"activation_checkpointing": "full"}
BOTH = TENSOR_DIALS[", both"]
IN_TURNS = ("interleaved_1f1b", "looped_bfs", "zb_h1", "zbv")
"""Schedules with several stages on a rank, or with backwards in parts."""
FEW_SAMPLES = 10  # of three batches the last one is half as large

CASES = {
    **dict(cases_of_products()),
    "2 stages, gpipe, recomputed": Case({"pp": 2}, shard=FULL, schedule="gpipe"),
    "2 stages x 2 replicas, gpipe": Case({"pp": 2, "dp_replicate": 2}, schedule="gpipe"),
    "2 stages x 2 replicas, zbv": Case(
        {"pp": 2, "dp_replicate": 2}, {}, {}, "zbv", "auto", num_samples=FEW_SAMPLES
    ),
    "2 stages x 2 shards, gpipe": Case({"pp": 2, "dp_shard": 2}, schedule="gpipe"),
    "2 stages x 2 tensor ranks, both, gpipe": Case({"pp": 2, "tp": 2}, BOTH, schedule="gpipe"),
    "2 stages x 2 shards, recomputed and gathered again": Case(
        {"pp": 2, "dp_shard": 2}, shard={**FULL, "reshard_after_forward": True}
    ),
    "2 stages x 2 shards, offloaded": Case({"pp": 2, "dp_shard": 2}, shard={"offload": "cpu"}),
    **{
        f"2 stages x 2 shards, {schedule}, accumulated": replace(
            accumulated(Case({"pp": 2, "dp_shard": 2}, schedule=schedule)), num_samples=FEW_SAMPLES
        )
        for schedule in IN_TURNS
    },
    **{
        f"2 stages x 2 tensor ranks, both, {schedule}, recomputed": Case(
            {"pp": 2, "tp": 2}, BOTH, FULL, schedule, num_samples=FEW_SAMPLES
        )
        for schedule in IN_TURNS
    },
    "2 stages x 2 shards, zbv, recomputed and gathered again": Case(
        {"pp": 2, "dp_shard": 2},
        {},
        {**FULL, "reshard_after_forward": True},
        "zbv",
        "auto",
        num_samples=FEW_SAMPLES,
    ),
    "2 replicas, recomputed": Case({"dp_replicate": 2}, shard=FULL),
    "2 shards x 2 tensor ranks, recomputed": Case({"dp_shard": 2, "tp": 2}, BOTH, FULL),
    "2 stages x 2 shards x 2 tensor ranks, both": Case(
        {"pp": 2, "dp_shard": 2, "tp": 2}, BOTH, num_samples=3 * BATCH_SIZE
    ),
}
