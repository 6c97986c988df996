"""Everything of a pipeline that exists between a strategy's ``setup`` and its ``teardown``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.pipeline.connect import Channels, connect
from lightning_dist.engine.pipeline.gradients import HeldGradients, ReplicaWeights
from lightning_dist.engine.pipeline.pipeline import OnComplete, Pipeline
from lightning_dist.engine.pipeline.stages import StageOptions
from lightning_dist.engine.pipeline.tied_gradients import TiedSums
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.splitting.split import PipelineSplit
from lightning_dist.engine.splitting.ties import find_ties
from lightning_dist.engine.tensors.patch import with_hooks
from lightning_dist.strategies.base.clipping import norms_of_all_stages
from lightning_dist.strategies.base.distributed import DistributedStrategy
from lightning_dist.strategies.base.metrics import StageMetrics
from lightning_dist.strategies.base.precision_plugin import half_precision_of
from lightning_dist.strategies.pipelining.hook_log import HookLog
from lightning_dist.strategies.pipelining.outside_calls import OutsideCalls
from lightning_dist.strategies.pipelining.rank_zero_calls import RankZeroCalls
from lightning_dist.strategies.pipelining.staleness_log import LoggedStaleness, StalenessLog
from lightning_dist.strategies.pipelining.step_runner import StepRunner
from lightning_dist.strategies.pipelining.step_state import StepState
from lightning_dist.strategies.pipelining.updates import Updates


@dataclass(frozen=True, slots=True)
class WrappedStages:
    """How stages run whose layers have been wrapped, for example sharded.

    Attributes:
        layers: Returns the module that runs a stage's layers.
        gradients: Creates the holder of a stage's gradients until an update. Autograd runs the
            parameters' hooks in each backward. None for stages of whole layers.
        change_step: Wraps each of the user's steps.
        reshard: Frees gathered parameters.
        begin_sums: Called before gradients are added to those that an earlier update has left.
    """

    layers: Callable[[int], nn.Module]
    gradients: Callable[[int], HeldGradients] | None
    change_step: Callable[[Callable[..., Any]], Callable[..., Any]]
    reshard: Callable[[], None]
    begin_sums: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Session:
    """The parts of a pipeline during a run.

    Attributes:
        mesh: All ranks.
        pipeline: This rank's stages.
        channels: The channels to the other stages.
        metrics: The module's torchmetrics objects.
        step_state: Shares what steps leave in the module.
        runner: Runs the user's steps.
        updates: Applies the gradients.
        tied: Sums the gradients of parameters that several stages use.
        hook_log: Reduces the values that hooks log over the stages.
        staleness_log: Logs the staleness of weights; None if that is not asked for.
    """

    mesh: MeshShape
    pipeline: Pipeline
    channels: Channels
    metrics: StageMetrics
    step_state: StepState
    runner: StepRunner
    updates: Updates
    tied: TiedSums
    hook_log: HookLog
    staleness_log: StalenessLog | None

    @property
    def counted_elsewhere(self) -> list[nn.Parameter]:
        """This rank's parameters that another stage counts in the norm of the whole gradient."""
        return _counted_elsewhere(self.pipeline, self.tied)

    def close(self, *, failed: bool) -> None:
        """Closes all parts. Collective: every rank must call it."""
        if failed:
            self.pipeline.clear()
        self.hook_log.close()
        self.step_state.close()
        self.pipeline.stages.on_call = None  # a cycle with a group, as above
        self.metrics.detach()
        self.pipeline.detach()
        self.channels.close(failed=failed)


def open_session(
    strategy: DistributedStrategy,
    split: PipelineSplit,
    config: PipelineConfig,
    complete_gradients: Callable[[], None],
    *,
    complete_early: OnComplete | None = None,
    wrapped: WrappedStages | None = None,
    optimizer: Optimizer | None = None,
    logged: LoggedStaleness | None = None,
) -> Session:
    """Creates the parts of a pipeline. Collective: every rank must call it.

    If a later step fails, the channels are closed again.

    Args:
        strategy: The strategy, whose processes have met.
        split: This rank's part of the model.
        config: The arguments of the pipeline.
        complete_gradients: Called before each update with the rank's gradients in place.
        complete_early: Called instead of ``complete_gradients`` when gradients are final before
            the update is due (2BW).
        wrapped: How the stages run; None runs the layers as they are.
        optimizer: The optimizer of this rank's parameters; None if nothing is trained.
        logged: The staleness values to log; None for none.
    """
    module, mesh, device = strategy.module, strategy.mesh, strategy.root_device
    precision, found = strategy.precision_plugin, split.layers
    pp_group, data_group = strategy.group("pp"), strategy.data_group
    gradient_group = strategy.group(*strategy.gradient_axes)
    predict = config.prediction(optimizer)  # before the channels, for it may refuse
    shape = config.shape(mesh, strategy.global_rank, split.layers_per_stage)
    ties = find_ties(found, shape.layers_per_stage)
    homes = shape.rank_of_stage
    channels = connect(
        mesh.groups("pp"),
        device,
        strategy.timeout_seconds,
        rank_of_stage=homes,
        holders={tie.ranks(homes) for tie in ties},
        p2p_backend=config.p2p_backend(strategy.device_backend, device),
    )
    with ExitStack() as if_it_fails:
        if_it_fails.callback(channels.close)
        layers = None if wrapped is None else wrapped.layers
        gradients = None if wrapped is None else wrapped.gradients
        runs_hooks = gradients is None  # once for each batch; otherwise autograd has

        def change(name: str, gradient: Tensor) -> Tensor | None:
            parameter = found.module.get_parameter(name)
            return with_hooks(parameter, gradient) if runs_hooks else gradient

        tied = TiedSums(
            ties, rank_of_stage=homes, rank=shape.rank, links=channels.ties, change=change
        )
        tied.share(dict(found.module.named_parameters(remove_duplicate=False)))
        half = half_precision_of(precision)
        weights = None
        if half is not None:
            weights = half.leave_to_stages(found, is_in_graph=gradients is not None)
        masters_dtype = None if weights is None else torch.float32
        options = StageOptions(
            weight_versions=config.weight_versions,
            seed=strategy.seed,
            device=device,
            layers=layers,
            gradients=gradients or (lambda _: HeldGradients(masters_dtype)),
            predict=predict,
            measure_discrepancy=logged is not None and logged.discrepancy,
            half=weights,
        )
        pipeline = Pipeline(
            found,
            shape,
            channels.links,
            options,
            rank=strategy.global_rank,
            on_complete=complete_early,
            average_weight=ReplicaWeights(gradient_group).average,
            shared=tied.names,
        )
        if_it_fails.callback(pipeline.detach)
        log = None if logged is None else StalenessLog(module, pipeline, logged)
        pp_ranks = dist.get_process_group_ranks(pp_group)
        last_rank = pp_ranks[homes[-1]]
        has_last = pipeline.stages.has_last
        pipeline.stages.on_call = OutsideCalls(
            pipeline,
            pp_group,
            last_rank,
            device,
            strategy.timeout_seconds,
            change_step=None if wrapped is None else wrapped.change_step,
            finish=None if wrapped is None else wrapped.reshard,
            is_reading=lambda: strategy.is_reading,
        )
        pipelined = split.pipelined_modules(module)
        metrics = StageMetrics(
            module,
            pipelined,
            pipeline_group=pp_group,
            data_group=data_group,
            source=last_rank,
            is_source=has_last,
        )
        outside = split.tensors_outside(module)
        step_state = StepState(module, outside, pipelined, pp_group, last_rank, is_source=has_last)
        runner = StepRunner(
            module,
            pipeline,
            channels,
            metrics,
            step_state,
            _rank_zero_calls(strategy, pp_ranks, last_rank),
            evaluation_microbatches=config.evaluation_microbatches(mesh.pp),
            change_step=None if wrapped is None else wrapped.change_step,
            half=half,
        )
        elsewhere = partial(_counted_elsewhere, pipeline, tied)
        norms: Callable[[], AbstractContextManager[None]]
        norms = partial(norms_of_all_stages, pp_group, elsewhere)
        if pipeline.asynchronous:  # stages update one after the other, by their own norms
            norms = nullcontext
        updates = Updates(
            module,
            pipeline,
            precision,
            tied,
            begin_sums=None if wrapped is None else wrapped.begin_sums,
            complete_gradients=complete_gradients,
            on_update=None if log is None else log.post,
            norms=norms,
            rate_correction=config.rate_correction(shape),
        )
        session = Session(
            mesh=mesh,
            pipeline=pipeline,
            channels=channels,
            metrics=metrics,
            step_state=step_state,
            runner=runner,
            updates=updates,
            tied=tied,
            hook_log=HookLog(module, pp_group, asynchronous=pipeline.asynchronous),
            staleness_log=log,
        )
        if_it_fails.pop_all()
        return session


def _counted_elsewhere(pipeline: Pipeline, tied: TiedSums) -> list[nn.Parameter]:
    parameters = pipeline.stages.named_parameters().items()
    return [p for name, p in parameters if not tied.counts(name)]


def _rank_zero_calls(
    strategy: DistributedStrategy, pp_ranks: Sequence[int], last_rank: int
) -> RankZeroCalls:
    """Returns what notes this rank's calls; rank 0 and the last stage see each other's ranks."""
    rank = strategy.global_rank
    seen = {0: last_rank, last_rank: 0}.get(rank, rank) if 0 in pp_ranks else rank
    return RankZeroCalls(
        strategy.module,
        is_source=0 in pp_ranks and rank == last_rank,
        as_seen=partial(strategy.shown_as, seen),
    )
