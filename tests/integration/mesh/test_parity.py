"""The recipe's GPT under MeshStrategy equals a single device's, for each mesh of few ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from lightning_dist import MeshStrategy
from lightning_dist.strategies.pipeline_config import PipelineConfig
from lightning_dist.strategies.shard_config import ShardConfig
from lightning_dist.tensor.config import TensorConfig
from tests.helpers.gpt_parity import Fitted, check_equal, fit
from tests.helpers.workers import WorkerPool


@dataclass(frozen=True)
class Case:
    """A mesh, and what is special about it.

    Attributes:
        sizes: By axis.
        tensor: Dials of tensor parallelism.
        shard: Dials of the shards.
        accumulate: Batches for an update.
        num_samples: Of an epoch; batches have four.
    """

    sizes: dict[str, int]
    tensor: dict[str, Any] = field(default_factory=dict)
    shard: dict[str, Any] = field(default_factory=dict)
    schedule: Any = "1f1b"
    accumulate: int = 1
    num_samples: int = 36

    @property
    def devices(self) -> int:
        sizes = self.sizes.values()
        product = 1
        for size in sizes:
            product *= size
        return product

    @property
    def replicas(self) -> int:
        return self.sizes.get("dp_replicate", 1) * self.sizes.get("dp_shard", 1)

    def fit(self) -> Fitted:
        strategy = MeshStrategy(
            **{"dp_shard": 1, **self.sizes},
            pipeline=PipelineConfig(schedule=self.schedule, num_microbatches=2),
            tensor=TensorConfig(**self.tensor),
            shard=ShardConfig(**self.shard),
        )
        return fit(
            self.devices, strategy, self.num_samples, accumulate_grad_batches=self.accumulate
        )


SEQUENCE, LOSS = {"sequence_parallel": True}, {"loss_parallel": True}
BOTH = {**SEQUENCE, **LOSS}

CASES = {
    "pp 2": Case({"pp": 2}),
    "pp 2, an uneven last batch": Case({"pp": 2}, num_samples=34),
    "replicas 2": Case({"dp_replicate": 2}),
    "replicas 2, recomputed": Case({"dp_replicate": 2}, shard={"activation_checkpointing": "full"}),
    "pp 2 x shards 2": Case({"pp": 2, "dp_shard": 2}),
    "pp 2 x shards 2, gpipe": Case({"pp": 2, "dp_shard": 2}, schedule="gpipe"),
    "pp 2 x shards 2, accumulated": Case({"pp": 2, "dp_shard": 2}, accumulate=2),
    "pp 2 x shards 2, recomputed and gathered again": Case(
        {"pp": 2, "dp_shard": 2},
        shard={"activation_checkpointing": "full", "reshard_after_forward": True},
    ),
    "pp 2 x replicas 2": Case({"pp": 2, "dp_replicate": 2}),
    "pp 2 x tp 2, accumulated": Case({"pp": 2, "tp": 2}, accumulate=2),
    "pp 2 x tp 2, sequence": Case({"pp": 2, "tp": 2}, SEQUENCE),
    "pp 2 x tp 2, loss": Case({"pp": 2, "tp": 2}, LOSS),
    "pp 2 x tp 2, both": Case({"pp": 2, "tp": 2}, BOTH),
    "pp 4": Case({"pp": 4}),
    "replicas 2 x shards 2": Case({"dp_replicate": 2, "dp_shard": 2}),
    "replicas 2 x tp 2, both": Case({"dp_replicate": 2, "tp": 2}, BOTH),
    "pp 2 x shards 2 x tp 2, both": Case({"pp": 2, "dp_shard": 2, "tp": 2}, BOTH),
}


def fit_on_mesh(case: Case) -> Fitted:
    return case.fit()


@pytest.mark.parametrize("name", CASES)
def test_equals_a_single_device(
    workers: WorkerPool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    case = CASES[name]
    single = fit(1, "auto", case.num_samples, accumulate_grad_batches=case.accumulate)
    ranks = workers.run(case.devices, fit_on_mesh, case, timeout=120.0)
    num_batches = -(-case.num_samples // 4)
    check_equal(ranks, single, case.replicas, -(-num_batches // case.accumulate))
