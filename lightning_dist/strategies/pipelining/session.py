"""Opens all parts of a pipeline at a strategy's ``setup``, and closes them at its ``teardown``.

Two strategies run pipelines, on whole layers and on shards. The parts and their order are the same
for both. What differs is passed to :class:`Session` by keyword.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist.engine.common.mesh_shape import DATA_AXES
from lightning_dist.engine.comms.connect import Channels, connect
from lightning_dist.engine.pipeline.gradients import HeldGradients
from lightning_dist.engine.pipeline.loss_weights import ReplicaWeights
from lightning_dist.engine.pipeline.pipeline import OnComplete, Pipeline
from lightning_dist.engine.pipeline.stages import StageOptions
from lightning_dist.engine.pipeline.tied_gradients import TiedSums
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.splitting.layers import Layers
from lightning_dist.engine.splitting.split import PipelineSplit
from lightning_dist.engine.splitting.ties import Tie, find_ties
from lightning_dist.engine.tensors.patch import with_hooks
from lightning_dist.strategies.base.callback_order import add_first_callback
from lightning_dist.strategies.base.clipping import norms_of_whole_gradient
from lightning_dist.strategies.base.distributed import DistributedStrategy
from lightning_dist.strategies.base.precision_plugin import HalfPrecisionPlugin, half_precision_of
from lightning_dist.strategies.base.run_setup import ChangeStep
from lightning_dist.strategies.pipelining.outside_calls import OutsideCalls
from lightning_dist.strategies.pipelining.results.hook_log import HookLog
from lightning_dist.strategies.pipelining.results.outside_tensors import OutsideTensors
from lightning_dist.strategies.pipelining.results.rank_zero_calls import RankZeroCalls
from lightning_dist.strategies.pipelining.results.stage_metrics import StageMetrics
from lightning_dist.strategies.pipelining.results.staleness_log import DISCREPANCY, StalenessLog
from lightning_dist.strategies.pipelining.results.step_state import StepState
from lightning_dist.strategies.pipelining.start_line import StartLine
from lightning_dist.strategies.pipelining.step_runner import StepRunner
from lightning_dist.strategies.pipelining.updates import Updates


@dataclass(frozen=True, slots=True)
class WrappedStages:
    """How stages run whose layers have been wrapped, for example sharded.

    Attributes:
        layers: Returns the module that runs a stage's layers; None runs the layers as they are.
        gradients: Creates the holder of a stage's gradients until an update. Autograd runs the
            parameters' hooks in each backward. None for stages of whole layers.
        change_step: Wraps each of the user's steps.
        reshard: Frees gathered parameters.
        begin_sums: Called before gradients are added to those that an earlier update has left.
    """

    layers: Callable[[int], nn.Module] | None = None
    gradients: Callable[[int], HeldGradients] | None = None
    change_step: ChangeStep = lambda step: step
    reshard: Callable[[], None] = lambda: None
    begin_sums: Callable[[], None] = lambda: None

    @property
    def runs_hooks(self) -> bool:
        """Whether parameters' hooks are to be run on a batch's gradients; else autograd has."""
        return self.gradients is None


class Session:
    """The parts of a pipeline during a run. Collective: every rank must create it.

    The order in which parts are created is a protocol: all ranks follow it, and wait for each other
    in some of its steps. If a step fails, what is open by then is closed.

    Args:
        complete_gradients: Called before each update with the rank's gradients in place.
        complete_early: Called instead of ``complete_gradients`` when gradients are final before
            the update is due (2BW).
        wrapped: How the stages run.
        logged: Names of the values of :mod:`.staleness_log` to log.
        statistics: Modules that compute statistics of the batch.

    Attributes:
        step_state: Shares what steps leave in the module.
        tied: Sums the gradients of parameters that several stages use.
        staleness_log: Logs the staleness of weights; None if that is not asked for.
    """

    def __init__(
        self,
        strategy: DistributedStrategy,
        split: PipelineSplit,
        config: PipelineConfig,
        complete_gradients: Callable[[], None],
        *,
        complete_early: OnComplete | None = None,
        wrapped: WrappedStages = WrappedStages(),  # noqa: B008  (it is frozen)
        optimizer: Optimizer | None = None,
        logged: Collection[str] = (),
        statistics: Sequence[str] = (),
    ) -> None:
        module, mesh, device = strategy.module, strategy.mesh, strategy.root_device

        # 1. The groups, and what may refuse, before any stage waits for another.
        stages, data_group = strategy.group("pp"), strategy.data_group
        averaged_along = (DATA_AXES, strategy.gradient_axes)  # the former while replicas warm up
        weights = {axes: ReplicaWeights(strategy.group(*axes)) for axes in averaged_along}
        predict = config.prediction(optimizer)
        shape = config.shape(mesh, strategy.global_rank, split.layers_per_stage)
        ties = find_ties(split.layers, shape.layers_per_stage)

        # 2. The channels, which all ranks of the world open together.
        self.channels = connect(
            mesh.groups("pp"),
            device,
            strategy.timeout_seconds,
            rank_of_stage=shape.rank_of_stage,
            holders={tie.ranks(shape.rank_of_stage) for tie in ties},
            p2p_backend=config.p2p_backend(strategy.device_backend, device),
        )
        with ExitStack() as if_it_fails:
            if_it_fails.callback(self.channels.close)

            # 3. This rank's stages, when copies of a parameter have the same value on all stages.
            self.tied = _share_tied(
                ties, split, shape, self.channels, runs_hooks=wrapped.runs_hooks
            )
            half = half_precision_of(strategy.precision_plugin)
            options = replace(
                stage_options(split.layers, wrapped, half, device),
                weight_versions=config.weight_versions,
                seed=strategy.seed,
                predict=predict,
                measure_discrepancy=DISCREPANCY in logged,
            )
            self.pipeline = Pipeline(
                split.layers,
                shape,
                self.channels.links,
                options,
                rank=strategy.global_rank,
                on_complete=complete_early,
                average_weight=lambda weight: weights[strategy.update_axes].average(weight),
                shared=self.tied.names,
            )
            if_it_fails.callback(self.pipeline.detach)

            # 4. What the last stage makes known to the others.
            last_rank = dist.get_process_group_ranks(stages)[shape.rank_of_stage[-1]]
            has_last = self.pipeline.stages.has_last
            self.staleness_log: StalenessLog | None = None
            if logged:
                group = strategy.group("pp", purpose="staleness")
                self.staleness_log = StalenessLog(module, self.pipeline, group, logged)
            self.pipeline.stages.on_call = OutsideCalls(
                strategy,
                self.pipeline,
                last_rank,
                change_step=wrapped.change_step,
                finish=wrapped.reshard,
            )
            pipelined = split.pipelined_modules(module)
            self._metrics = StageMetrics(
                module,
                pipelined,
                pipeline_group=stages,
                data_group=data_group,
                source=last_rank,
                is_source=has_last,
            )
            outside = OutsideTensors(
                module,
                split.tensors_outside(module),
                stages,
                waits=not self.pipeline.asynchronous,
            )
            if_it_fails.callback(outside.close)
            self.step_state = StepState(
                module, outside, pipelined, stages, last_rank, is_source=has_last
            )

            # 5. The steps, and the updates that they bring.
            self.runner = StepRunner(
                module,
                self.pipeline,
                self.channels,
                self._metrics,
                self.step_state,
                outside,
                _rank_zero_calls(strategy, stages, last_rank),
                evaluation_microbatches=config.evaluation_microbatches(mesh.pp),
                change_step=wrapped.change_step,
                half=half,
            )
            self.updates = Updates(
                module,
                self.pipeline,
                strategy.precision_plugin,
                self.tied,
                begin_sums=wrapped.begin_sums,
                complete_gradients=complete_gradients,
                on_update=self.staleness_log.post if self.staleness_log else lambda: None,
                norms=_norms_in_hooks(self.pipeline, self.tied, stages),
                rate_correction=config.rate_correction(shape),
            )

            # 6. The hooks' log, for which stages tell each other which hooks they have.
            self._hook_log = HookLog(module, stages, asynchronous=self.pipeline.asynchronous)
            are_synced = strategy.has_joint_statistics
            line = StartLine(self.pipeline, mesh, split.source, statistics, are_synced=are_synced)
            self._remove_line = add_first_callback(module.trainer, line)
            if_it_fails.pop_all()

    @property
    def counted_elsewhere(self) -> list[nn.Parameter]:
        """This rank's parameters that another stage counts in the norm of the whole gradient."""
        return _counted_elsewhere(self.pipeline, self.tied)

    def close(self, *, failed: bool) -> None:
        """Closes all parts. Collective: every rank must call it."""
        if failed:
            self.pipeline.clear()
        self._remove_line()
        self._hook_log.close()
        self.step_state.close()
        self.pipeline.stages.on_call = None  # a cycle with a group
        self._metrics.detach()
        self.pipeline.detach()
        self.channels.close(failed=failed)


def _share_tied(
    ties: Sequence[Tie],
    split: PipelineSplit,
    shape: PipelineShape,
    channels: Channels,
    *,
    runs_hooks: bool,
) -> TiedSums:
    """Creates the sums of tied gradients, and sends each tied parameter's value to its copies.

    Collective: all stages must call it.
    """
    layers = split.layers.module

    def change(name: str, gradient: Tensor) -> Tensor | None:
        return with_hooks(layers.get_parameter(name), gradient) if runs_hooks else gradient

    tied = TiedSums(ties, shape.rank_of_stage, shape.rank, channels.ties, change)
    tied.share(dict(layers.named_parameters(remove_duplicate=False)))
    return tied


def stage_options(
    layers: Layers, wrapped: WrappedStages, half: HalfPrecisionPlugin | None, device: torch.device
) -> StageOptions:
    """Returns how stages run, as far as the precision and their wrappers tell."""
    weights = None
    if half is not None:
        weights = half.leave_to_stages(layers, is_in_graph=not wrapped.runs_hooks)
    masters_dtype = None if weights is None else torch.float32
    return StageOptions(
        device=device,
        layers=wrapped.layers,
        gradients=wrapped.gradients or (lambda _: HeldGradients(masters_dtype)),
        half=weights,
    )


def _rank_zero_calls(
    strategy: DistributedStrategy, stages: dist.ProcessGroup, last_rank: int
) -> RankZeroCalls:
    """Lets rank 0 and the last stage of its replica see each other's ranks in steps."""
    rank, with_first = strategy.global_rank, 0 in dist.get_process_group_ranks(stages)
    seen = {0: last_rank, last_rank: 0}.get(rank, rank) if with_first else rank
    return RankZeroCalls(
        strategy.module,
        is_source=with_first and rank == last_rank,
        as_seen=partial(strategy.shown_as, seen),
        as_itself=partial(strategy.shown_as, rank),
    )


def _norms_in_hooks(
    pipeline: Pipeline, tied: TiedSums, stages: dist.ProcessGroup
) -> Callable[[], AbstractContextManager[None]]:
    if pipeline.asynchronous:  # stages update one after the other, by their own norms
        return nullcontext
    return partial(norms_of_whole_gradient, stages, partial(_counted_elsewhere, pipeline, tied))


def _counted_elsewhere(pipeline: Pipeline, tied: TiedSums) -> list[nn.Parameter]:
    # No method: a cycle with groups could be freed in a forked process, and wait there.
    parameters = pipeline.stages.named_parameters().items()
    return [p for name, p in parameters if not tied.counts(name)]
