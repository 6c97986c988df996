"""Callbacks that know the layout of a rank, and its schedule."""

from lightning_dist.callbacks.elastic import Elastic
from lightning_dist.callbacks.gather_predictions import GatherPredictions
from lightning_dist.callbacks.mixed_precision import MixedPrecision
from lightning_dist.callbacks.sharded_weight_averaging import ShardedWeightAveraging
from lightning_dist.callbacks.stage_balancer import StageBalancer
from lightning_dist.callbacks.step_profiler import StepProfiler

__all__ = [
    "Elastic",
    "GatherPredictions",
    "MixedPrecision",
    "ShardedWeightAveraging",
    "StageBalancer",
    "StepProfiler",
]
