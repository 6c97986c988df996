"""Everything of a pipeline that exists between a strategy's ``setup`` and its ``teardown``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist.engine.pipeline.connect import connect
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
from lightning_dist.strategies.base.precision_plugin import half_precision_of
from lightning_dist.strategies.pipelining.outside_calls import OutsideCalls
from lightning_dist.strategies.pipelining.results.hook_log import HookLog
from lightning_dist.strategies.pipelining.results.rank_zero_calls import RankZeroCalls
from lightning_dist.strategies.pipelining.results.stage_metrics import StageMetrics
from lightning_dist.strategies.pipelining.results.staleness_log import DISCREPANCY, StalenessLog
from lightning_dist.strategies.pipelining.results.step_state import StepState
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
    change_step: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda step: step
    reshard: Callable[[], None] = lambda: None
    begin_sums: Callable[[], None] = lambda: None


class Session:
    """The parts of a pipeline during a run. Collective: every rank must create it.

    Args:
        complete_gradients: Called before each update with the rank's gradients in place.
        complete_early: Called instead of ``complete_gradients`` when gradients are final before
            the update is due (2BW).
        wrapped: How the stages run.
        logged: Names of the values of :mod:`.staleness_log` to log.

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
    ) -> None:
        module, mesh, device = strategy.module, strategy.mesh, strategy.root_device
        pp_group, data_group = strategy.group("pp"), strategy.data_group
        gradient_group = strategy.group(*strategy.gradient_axes)
        predict = config.prediction(optimizer)  # before the channels, for it may refuse
        shape = config.shape(mesh, strategy.global_rank, split.layers_per_stage)
        homes = shape.rank_of_stage
        ties = find_ties(split.layers, shape.layers_per_stage)
        self.channels = connect(
            mesh.groups("pp"),
            device,
            strategy.timeout_seconds,
            rank_of_stage=homes,
            holders={tie.ranks(homes) for tie in ties},
            p2p_backend=config.p2p_backend(strategy.device_backend, device),
        )
        with ExitStack() as if_it_fails:
            if_it_fails.callback(self.channels.close)
            runs_hooks = wrapped.gradients is None  # once for each batch; otherwise autograd has

            def change(name: str, gradient: Tensor) -> Tensor | None:
                parameter = split.layers.module.get_parameter(name)
                return with_hooks(parameter, gradient) if runs_hooks else gradient

            self.tied = TiedSums(
                ties, rank_of_stage=homes, rank=shape.rank, links=self.channels.ties, change=change
            )
            self.tied.share(dict(split.layers.module.named_parameters(remove_duplicate=False)))
            half = half_precision_of(strategy.precision_plugin)
            weights = None
            if half is not None:
                weights = half.leave_to_stages(split.layers, is_in_graph=not runs_hooks)
            masters_dtype = None if weights is None else torch.float32
            options = StageOptions(
                weight_versions=config.weight_versions,
                seed=strategy.seed,
                device=device,
                layers=wrapped.layers,
                gradients=wrapped.gradients or (lambda _: HeldGradients(masters_dtype)),
                predict=predict,
                measure_discrepancy=DISCREPANCY in logged,
                half=weights,
            )
            self.pipeline = Pipeline(
                split.layers,
                shape,
                self.channels.links,
                options,
                rank=strategy.global_rank,
                on_complete=complete_early,
                average_weight=ReplicaWeights(gradient_group).average,
                shared=self.tied.names,
            )
            if_it_fails.callback(self.pipeline.detach)
            self.staleness_log: StalenessLog | None = None
            if logged:
                group = strategy.group("pp", purpose="staleness")
                self.staleness_log = StalenessLog(module, self.pipeline, group, logged)
            pp_ranks = dist.get_process_group_ranks(pp_group)
            last_rank, has_last = pp_ranks[homes[-1]], self.pipeline.stages.has_last
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
                pipeline_group=pp_group,
                data_group=data_group,
                source=last_rank,
                is_source=has_last,
            )
            outside = split.tensors_outside(module)
            self.step_state = StepState(
                module, outside, pipelined, pp_group, last_rank, is_source=has_last
            )
            # Rank 0 and the last stage see each other's ranks.
            rank, with_first = strategy.global_rank, 0 in pp_ranks
            seen = {0: last_rank, last_rank: 0}.get(rank, rank) if with_first else rank
            calls = RankZeroCalls(
                module,
                is_source=with_first and rank == last_rank,
                as_seen=partial(strategy.shown_as, seen),
            )
            self.runner = StepRunner(
                module,
                self.pipeline,
                self.channels,
                self._metrics,
                self.step_state,
                calls,
                evaluation_microbatches=config.evaluation_microbatches(mesh.pp),
                change_step=wrapped.change_step,
                half=half,
            )
            elsewhere = partial(_counted_elsewhere, self.pipeline, self.tied)
            norms: Callable[[], AbstractContextManager[None]]
            norms = partial(norms_of_all_stages, pp_group, elsewhere)
            if self.pipeline.asynchronous:  # stages update one after the other, by their own norms
                norms = nullcontext
            self.updates = Updates(
                module,
                self.pipeline,
                strategy.precision_plugin,
                self.tied,
                begin_sums=wrapped.begin_sums,
                complete_gradients=complete_gradients,
                on_update=self.staleness_log.post if self.staleness_log else lambda: None,
                norms=norms,
                rate_correction=config.rate_correction(shape),
            )
            self._hook_log = HookLog(module, pp_group, asynchronous=self.pipeline.asynchronous)
            if_it_fails.pop_all()

    @property
    def counted_elsewhere(self) -> list[nn.Parameter]:
        """This rank's parameters that another stage counts in the norm of the whole gradient."""
        return _counted_elsewhere(self.pipeline, self.tied)

    def close(self, *, failed: bool) -> None:
        """Closes all parts. Collective: every rank must call it."""
        if failed:
            self.pipeline.clear()
        self._hook_log.close()
        self.step_state.close()
        self.pipeline.stages.on_call = None  # a cycle with a group
        self._metrics.detach()
        self.pipeline.detach()
        self.channels.close(failed=failed)


def _counted_elsewhere(pipeline: Pipeline, tied: TiedSums) -> list[nn.Parameter]:
    # No method: a cycle with groups could be freed in a forked process, and wait there.
    parameters = pipeline.stages.named_parameters().items()
    return [p for name, p in parameters if not tied.counts(name)]
