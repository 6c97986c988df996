"""Callbacks that know what a rank holds."""

from lightning_dist.callbacks.sharded_weight_averaging import ShardedWeightAveraging
from lightning_dist.callbacks.stage_balancer import StageBalancer

__all__ = ["ShardedWeightAveraging", "StageBalancer"]
