"""All parallelisms put on one module, in an order that is the specification."""

from lightning_dist.engine.parallelize.composition import ParallelModule, parallelize
from lightning_dist.engine.parallelize.parallelism import Parallelism
from lightning_dist.engine.parallelize.shard_config import ShardConfig

__all__ = ["ParallelModule", "Parallelism", "ShardConfig", "parallelize"]
