"""The strategies that a case may name, and what is to be compared with what."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lightning.pytorch.strategies import Strategy

from lightning_dist import (
    AutoStrategy,
    DDPStrategy,
    FSDPStrategy,
    HogwildStrategy,
    MeshStrategy,
    OuterOptimizer,
    ParameterServerStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)
from lightning_dist.engine.data_parallel.local_config import LocalConfig
from lightning_dist.engine.parallelize.shard_config import ShardConfig
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from tests.differential.dials.models import OF_UNUSED_PARAMETERS

PLAN = {"model.*.linear": "colwise_gather"}
FINDS_UNUSED: dict[object, dict[str, object]] = {
    DDPStrategy: {"find_unused_parameters": True},
    FSDPStrategy: {"find_unused_parameters": True},
    AutoStrategy: {"find_unused_parameters": True},
    MeshStrategy: {"shard": ShardConfig(find_unused_parameters=True)},
}


@dataclass(frozen=True)
class Entry:
    """A strategy on some processes.

    Attributes:
        devices: Number of processes.
        replicas: Number of data replicas.
        make: Builds the strategy.
        stages: Number of pipeline stages.
        microbatches: Number of micro-batches of a batch.
        versions: Which weights a batch meets, by name in ``oracle_strategy``; None is the newest.
        is_slow: Whether it is drawn half as often as others.
        is_spread: Whether ranks have pieces of layers.
        is_sharded: Whether ranks have shards of parameters.
        averages_behind_hooks: Whether a rank clips its own gradient.
        shares_steps: Whether each step ties all ranks. Else a stop comes at no certain batch.
        tolerance: How far values may be from one device's, beyond rounding; infinite if replicas
            step by themselves, so that only the rest of a run is compared.
    """

    devices: int
    replicas: int
    make: Callable[[], Strategy]
    stages: int = 1
    microbatches: int = 1
    versions: str | None = None
    is_slow: bool = False
    is_spread: bool = False
    is_sharded: bool = False
    averages_behind_hooks: bool = False
    shares_steps: bool = True
    tolerance: float = 0.0

    @property
    def is_pipeline(self) -> bool:
        """Whether the model is cut into stages."""
        return self.stages > 1

    @property
    def batches_to_stop(self) -> int:
        """Batches from where one rank wants to stop to where all do."""
        return self.devices if self.versions is not None else 1

    def strategy_for(self, model: str) -> Strategy:
        """Builds the strategy, which is told if steps of a model may leave parameters out."""
        kind = getattr(self.make, "func", None)
        options = FINDS_UNUSED.get(kind, {}) if model in OF_UNUSED_PARAMETERS else {}
        return partial(self.make, **options)()


def _pipeline(
    schedule: str, microbatches: int | str, versions: str | None = None, **options: object
) -> Entry:
    strategy: Callable[[], Strategy] = partial(
        PipelineStrategy,
        schedule=schedule,
        num_microbatches=microbatches,
        partition="uniform",
        timeout_s=20.0,
        **options,
    )
    stages = 4 if schedule in ("interleaved_1f1b", "looped_bfs", "zbv") else 2
    count = microbatches if isinstance(microbatches, int) else 2
    return Entry(2, 1, strategy, stages, count, versions)


STRATEGIES: dict[str, Entry] = {
    "ddp": Entry(2, 2, partial(DDPStrategy, timeout_s=20.0)),
    "server": Entry(
        2,
        2,
        partial(ParameterServerStrategy, num_servers=2, timeout_s=20.0),
        averages_behind_hooks=True,
    ),
    "server_async": Entry(
        2,
        2,
        partial(ParameterServerStrategy, "async", timeout_s=20.0),
        averages_behind_hooks=True,
        shares_steps=False,
        tolerance=math.inf,
    ),
    "server_bounded": Entry(
        2,
        2,
        partial(ParameterServerStrategy, "bounded", 1, num_servers=2, timeout_s=20.0),
        averages_behind_hooks=True,
        shares_steps=False,
        tolerance=math.inf,
    ),
    "hogwild": Entry(
        2,
        2,
        partial(HogwildStrategy, timeout_s=20.0),
        averages_behind_hooks=True,
        shares_steps=False,
        tolerance=math.inf,
    ),
    "auto": Entry(
        2,
        2,
        partial(AutoStrategy, replicas=2, timeout_s=20.0),
        is_slow=True,
        is_sharded=True,
    ),
    "fsdp": Entry(2, 2, partial(FSDPStrategy, timeout_s=20.0), is_sharded=True),
    "ddp_int8": Entry(
        2, 2, partial(DDPStrategy, compression="int8", timeout_s=20.0), tolerance=5e-2
    ),
    "ddp_topk": Entry(
        2, 2, partial(DDPStrategy, compression="topk", topk_fraction=1.0, timeout_s=20.0)
    ),
    "local_sgd": Entry(
        2, 2, partial(DDPStrategy, sync_every=3, timeout_s=20.0), tolerance=math.inf
    ),
    "diloco": Entry(
        2,
        2,
        partial(DDPStrategy, sync_every=2, outer=OuterOptimizer(), timeout_s=20.0),
        tolerance=math.inf,
    ),
    "streaming_diloco": Entry(
        2,
        2,
        partial(
            DDPStrategy,
            sync_every=3,
            outer=OuterOptimizer(),
            fragments=2,
            delay=1,
            alpha=0.5,
            wire="bf16",
            timeout_s=20.0,
        ),
        tolerance=math.inf,
    ),
    "fsdp_gradients": Entry(
        2, 2, partial(FSDPStrategy, shard="gradients", timeout_s=20.0), is_sharded=True
    ),
    "fsdp_optimizer": Entry(
        2, 2, partial(FSDPStrategy, shard="optimizer", timeout_s=20.0), is_sharded=True
    ),
    "tp": Entry(2, 1, partial(TensorParallelStrategy, plan=PLAN, timeout_s=20.0), is_spread=True),
    "gpipe": _pipeline("gpipe", 3),
    "gpipe_whole": _pipeline("gpipe", 1),
    "1f1b": _pipeline("1f1b", 2),
    "1f1b_auto": _pipeline("1f1b", "auto"),
    "zb_h1": _pipeline("zb_h1", 3),
    "zbv": _pipeline("zbv", 4),
    "interleaved": _pipeline("interleaved_1f1b", 4),
    "looped_bfs": _pipeline("looped_bfs", 4),
    "traced": _pipeline("1f1b", 2, layers="trace"),
    "pipedream": _pipeline("pipedream", 1, "stash"),
    "vertical_sync": _pipeline("pipedream", 1, "vertical_sync", weight_versions="vertical_sync"),
    "2bw": _pipeline("pipedream_2bw", 2, "2bw"),
    "pipedream_3": Entry(
        3,
        1,
        partial(PipelineStrategy, schedule="pipedream", partition="uniform", timeout_s=20.0),
        stages=3,
        versions="stash",
        is_slow=True,
    ),
    "mesh": Entry(
        4,
        2,
        partial(
            MeshStrategy,
            pp=2,
            dp_shard=2,
            pipeline=PipelineConfig(num_microbatches=2),
            timeout_s=20.0,
        ),
        stages=2,
        microbatches=2,
        is_slow=True,
        is_sharded=True,
    ),
    "spread_stages": Entry(
        4,
        1,
        partial(
            MeshStrategy,
            pp=2,
            tp=2,
            tensor=TensorConfig(plan=PLAN),
            pipeline=PipelineConfig(num_microbatches=2),
            timeout_s=20.0,
        ),
        stages=2,
        microbatches=2,
        is_slow=True,
        is_spread=True,
    ),
    "spread_shards": Entry(
        4,
        2,
        partial(MeshStrategy, dp_shard=2, tp=2, tensor=TensorConfig(plan=PLAN), timeout_s=20.0),
        is_slow=True,
        is_sharded=True,
        is_spread=True,
    ),
    "local_shards": Entry(
        4,
        4,
        partial(
            MeshStrategy,
            dp_replicate=2,
            dp_shard=2,
            local=LocalConfig(2, outer=OuterOptimizer()),
            timeout_s=20.0,
        ),
        is_slow=True,
        is_sharded=True,
        tolerance=math.inf,
    ),
    "local_stages": Entry(
        4,
        2,
        partial(
            MeshStrategy,
            pp=2,
            dp_replicate=2,
            dp_shard=1,
            pipeline=PipelineConfig(num_microbatches=2),
            local=LocalConfig(3, outer=OuterOptimizer(), delay=1),
            timeout_s=20.0,
        ),
        stages=2,
        microbatches=2,
        is_slow=True,
        tolerance=math.inf,
    ),
    "replicas": Entry(2, 2, partial(MeshStrategy, dp_replicate=2, timeout_s=20.0)),
    "replicas_of_shards": Entry(
        4, 4, partial(FSDPStrategy, shard_size=2, timeout_s=20.0), is_slow=True, is_sharded=True
    ),
    "replicas_of_stages": Entry(
        4,
        2,
        partial(
            MeshStrategy,
            pp=2,
            dp_replicate=2,
            dp_shard=1,
            pipeline=PipelineConfig(num_microbatches=2),
            timeout_s=20.0,
        ),
        stages=2,
        microbatches=2,
        is_slow=True,
    ),
}
