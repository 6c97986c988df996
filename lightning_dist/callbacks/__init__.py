"""Callbacks that know what a rank holds."""

from lightning_dist.callbacks.sharded_weight_averaging import ShardedWeightAveraging

__all__ = ["ShardedWeightAveraging"]
