"""Layers of a pipeline that change their rank while it trains.

Moves are requested by a user's callback, by :class:`.StageBalancer`, or by
``partition="profile"``, which runs the first batch before it is trained on, and discards the
results. A separate synchronous pipeline runs the stages meanwhile, over the same channels, so that
nothing is in flight or recorded in the pipeline that trains. No optimizer gets gradients. State
that a user's step may change (statistics, metrics, random number generators) is restored.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from typing_extensions import override

from lightning_dist.engine.common.device_group import gather_objects
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.pipeline.rebalance.relocation import LayerExchange
from lightning_dist.engine.pipeline.rebalance.repartition import (
    Repartition,
    agree_on_cut,
    refuse_shared_parameters,
)
from lightning_dist.engine.planning.balance import find_balance
from lightning_dist.engine.planning.layer_costs import RankProfile, StepCosts
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.splitting.split import PipelineSplit
from lightning_dist.engine.tensors.module_state import state_kept
from lightning_dist.engine.tensors.rng import random_state_kept
from lightning_dist.strategies.base.distributed import DistributedStrategy
from lightning_dist.strategies.base.precision_plugin import half_precision_of
from lightning_dist.strategies.pipelining.session import Session
from lightning_dist.strategies.pipelining.stage_updates import StageUpdates


class MovableLayers(StageUpdates):
    """A strategy whose ranks can hand layers to each other; see the module's docstring."""

    def __init__(self, config: PipelineConfig, **arguments: Any) -> None:
        super().__init__(config, **arguments)
        self._known_split: PipelineSplit | None = None
        self._exchange: LayerExchange | None = None

    @property
    @override
    def split(self) -> PipelineSplit | None:
        return self._known_split

    @property
    def _split(self) -> PipelineSplit:
        assert self._known_split is not None, "the model is cut in setup"
        return self._known_split

    def check_layers_can_move(self) -> None:
        """Raises ``ValueError`` before a run if layers share parameters."""
        refuse_shared_parameters(self._split.layers)

    def _find_half(self) -> None:
        half = half_precision_of(self.precision_plugin)
        if half is not None:
            half.find_parameters()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._config.partition == "profile":
            profile = profile_layers(self, self.session, batch, batch_idx)
            costs = StepCosts.of_ranks(gather_objects(profile, self.world_group))
            balance = find_balance(costs, self.session.pipeline.shape)
            self.repartition(balance.better_cut)

    def repartition(self, layers_per_stage: Sequence[int]) -> Repartition:
        """Moves layers between the ranks, and goes on with another cut.

        The pipeline is drained, and each layer that changes its rank is sent there with its
        parameters, buffers and optimizer state. The training afterwards equals, bit for bit, a run
        that was restarted from a checkpoint with ``partition=layers_per_stage``. The optimizer, its
        groups and schedulers, metrics and recorded values stay. The parameters of layers that
        arrive are other objects than those that the model was built with.

        Collective: every rank must call it with the same cut, between two batches. Callbacks and
        the module can do so in ``on_train_batch_start``, ``on_train_batch_end`` or a hook around
        epochs. Later tasks of this strategy keep the cut.

        Args:
            layers_per_stage: The new cut.

        Returns:
            The layers that have moved.

        Raises:
            ValueError: The cut does not fit the layers, ranks want different cuts, stages share
                parameters before or after, a step is running, or the model is not cut.
        """
        if self._session is None or self._in_step:
            when = "in a step" if self._in_step else "while the model is not cut"
            raise ValueError(
                f"repartition({list(layers_per_stage)}) was called {when}. Call it between two"
                " batches, in `on_train_batch_end` for example."
            )
        after = agree_on_cut(self._split, layers_per_stage, self.world_group)
        self._config = replace(self._config, partition=after)
        if after == self._split.layers_per_stage:
            return Repartition(after)
        begin = time.monotonic()
        with torch.inference_mode(mode=False):
            self.check_group_names()
            self.drain()
            exchange = self._open_exchange()
            self.check_peers()  # a rank that failed earlier has not interrupted the new exchange
            moves = exchange.run(
                self.session.pipeline,
                self._split.layers,
                after,
                self.optimizers,
                with_gradients=self.holds_gradients,
                on_moved=self._find_half,
            )
            self._known_split = replace(self._split, layers_per_stage=after)
            self.regroup_optimizers()
        done = Repartition(after, moves, time.monotonic() - begin)
        rank_zero_info(f"{done}")
        return done

    def _open_exchange(self) -> LayerExchange:
        if self._exchange is None:  # most runs move nothing, and groups take time
            self._exchange = LayerExchange(
                ranks=dist.get_process_group_ranks(self.group("pp")),
                groups=(self.group("pp", purpose="later"), self.group("pp", purpose="earlier")),
                device=self.root_device,
                timeout_seconds=self.timeout_seconds,
            )
        return self._exchange

    @override
    def interrupt(self, error: BaseException) -> None:
        if self._session is not None:
            self._session.channels.interrupt(error)
        if self._session is not None and self._exchange is not None:
            self._exchange.interrupt(error)


_WARMUP_RUNS = 2  # for caches and allocators to fill
_TIMED_RUNS = 5


def profile_layers(
    strategy: DistributedStrategy, session: Session, batch: Any, batch_idx: int
) -> RankProfile:
    """Times some runs of a training batch. Collective: every rank of the pipeline must call it."""
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
                pipeline.clear(failed=False)  # else gradients would add up
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
        shared=trains.shared,
    )
