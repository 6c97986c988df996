"""Run real batches and discard their results, to measure the layers' times before training.

A separate synchronous pipeline runs this rank's stages meanwhile, over the same channels, so
that nothing is in flight or recorded in the pipeline that trains. No optimizer gets gradients.
State that a user's step may change (statistics, metrics, random number generators) is restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.pipeline.rebalance.module_state import state_kept
from lightning_dist.engine.planning.layer_costs import RankProfile
from lightning_dist.engine.tensors.rng import random_state_kept
from lightning_dist.strategies.pipelining.session import RunContext, Session

_WARMUP_RUNS = 2  # for caches and allocators to fill
_TIMED_RUNS = 5


class WarmupProfile:
    """Times a rank's layers before they train.

    Args:
        module: The user's module.
        session: The session that trains later, with nothing in flight.
        run: The context of the run.
    """

    def __init__(self, module: pl.LightningModule, session: Session, run: RunContext) -> None:
        self._module = module
        self._session = session
        self._run = run

    def profile(self, batch: Any, batch_idx: int) -> RankProfile:
        """Times some runs of a training batch. Collective: every rank of the pipeline must call it.

        Args:
            batch: The batch of the next training step.
            batch_idx: Number of the batch.
        """
        context = self._run.precision_plugin.train_step_context
        arguments = _arguments_of(self._module, batch, batch_idx)
        trains = self._session.pipeline
        with trains.detached(), self._all_kept():
            pipeline = self._pipeline_like(trains)
            profiler = pipeline.stages.layer_profiler(pipeline.recorder)
            try:
                for run in range(_WARMUP_RUNS + _TIMED_RUNS):
                    if run == _WARMUP_RUNS:
                        profiler.start()
                    self._rehearse(pipeline, arguments, context)
            finally:
                profiler.stop()
                pipeline.detach()
        return profiler.profile()

    def _pipeline_like(self, trains: Pipeline) -> Pipeline:
        schedule = "1f1b" if trains.asynchronous else trains.shape.schedule
        return Pipeline(
            trains.stages.found,
            replace(trains.shape, schedule=schedule),
            trains.links,
            replace(
                trains.stages.options,
                weight_versions="stash",
                layers=None,
                predict=None,
                measure_discrepancy=False,
            ),
            rank=self._run.rank,
        )

    def _rehearse(
        self,
        pipeline: Pipeline,
        arguments: Sequence[Any],
        context: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._session.runner.rehearse(pipeline, arguments, context)
        pipeline.clear()  # else gradients would add up

    @contextmanager
    def _all_kept(self) -> Iterator[None]:
        trainer = self._module.trainer
        should_stop = trainer.should_stop
        try:
            with random_state_kept(self._run.device), state_kept(self._module):
                yield
        finally:
            trainer.should_stop = should_stop


def _arguments_of(module: pl.LightningModule, batch: Any, batch_idx: int) -> list[Any]:
    """Returns the arguments that Lightning calls the step with."""
    step = module.training_step
    takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
    return [batch, batch_idx] if takes_index else [batch]
