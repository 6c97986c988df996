"""Run real batches and discard their results, to measure the layers' times before training.

A separate synchronous pipeline runs this rank's stages meanwhile, over the same channels, so
that nothing is in flight or recorded in the pipeline that trains. No optimizer gets gradients.
State that a user's step may change (statistics, metrics, random number generators) is restored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.pipeline.rebalance.module_state import state_kept
from lightning_dist.engine.planning.layer_costs import RankProfile
from lightning_dist.engine.tensors.rng import random_state_kept
from lightning_dist.strategies.base.distributed import DistributedStrategy
from lightning_dist.strategies.pipelining.session import Session

_WARMUP_RUNS = 2  # for caches and allocators to fill
_TIMED_RUNS = 5


def profile_layers(
    strategy: DistributedStrategy, session: Session, batch: Any, batch_idx: int
) -> RankProfile:
    """Times some runs of a training batch. Collective: every rank of the pipeline must call it.

    Args:
        strategy: The strategy that trains.
        session: The session that trains later, with nothing in flight.
        batch: The batch of the next training step.
        batch_idx: Number of the batch.
    """
    module, trains = strategy.module, session.pipeline
    context = strategy.precision_plugin.train_step_context
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    arguments = [batch, batch_idx] if takes_index else [batch]
    should_stop = module.trainer.should_stop
    with trains.detached(), random_state_kept(strategy.root_device), state_kept(module):
        pipeline = _pipeline_like(trains)
        profiler = pipeline.stages.layer_profiler(pipeline.recorder)
        try:
            for run in range(_WARMUP_RUNS + _TIMED_RUNS):
                if run == _WARMUP_RUNS:
                    profiler.start()
                session.runner.rehearse(pipeline, arguments, context)
                pipeline.clear()  # else gradients would add up
        finally:
            profiler.stop()
            pipeline.detach()
            module.trainer.should_stop = should_stop
    return profiler.profile()


def _pipeline_like(trains: Pipeline) -> Pipeline:
    """Creates a synchronous pipeline of the same stages over the same channels."""
    schedule = "1f1b" if trains.asynchronous else trains.shape.schedule
    options = replace(
        trains.stages.options,
        weight_versions="stash",
        layers=None,
        predict=None,
        measure_discrepancy=False,
    )
    return Pipeline(
        trains.stages.found,
        replace(trains.shape, schedule=schedule),
        trains.links,
        options,
        rank=trains.recorder.rank,
    )
