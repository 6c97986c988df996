"""Everything of a pipeline that exists between a strategy's ``setup`` and its ``teardown``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.pipeline.connect import Channels, connect
from lightning_dist.engine.pipeline.gradients import HeldGradients, ReplicaWeights
from lightning_dist.engine.pipeline.pipeline import OnComplete, Pipeline
from lightning_dist.engine.pipeline.stages import StageOptions
from lightning_dist.engine.pipeline.tied_gradients import TiedSums
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.splitting.layers import Layers
from lightning_dist.engine.splitting.ties import find_ties
from lightning_dist.engine.tensors.patch import with_hooks
from lightning_dist.strategies.base.distributed import DistributedStrategy
from lightning_dist.strategies.base.metrics import StageMetrics
from lightning_dist.strategies.base.precision_plugin import half_precision_of
from lightning_dist.strategies.pipelining.hook_log import HookLog
from lightning_dist.strategies.pipelining.staleness_log import LoggedStaleness, StalenessLog
from lightning_dist.strategies.pipelining.step_runner import StepRunner
from lightning_dist.strategies.pipelining.updates import Updates


@dataclass(frozen=True, slots=True)
class RunContext:
    """The ranks and settings of the run that a pipeline belongs to, and calls before an update.

    Attributes:
        mesh: All ranks.
        rank: This rank among all.
        device: The device of this rank's tensors.
        device_backend: The backend of groups for such tensors.
        pp_group: The ranks of the stages of one copy of the model.
        data_group: The ranks that hold the same stages and read other data.
        gradient_group: Those of them whose gradients are averaged in each step.
        timeout_seconds: Seconds that a rank waits for another.
        seed: Base of the random numbers; the same on all ranks.
        precision: The precision of the steps.
        complete_gradients: Called before each update with the rank's gradients in place.
        complete_early: Called instead of ``complete_gradients`` when gradients are final before
            the update is due (2BW).
    """

    mesh: MeshShape
    rank: int
    device: torch.device
    device_backend: str
    pp_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    gradient_group: dist.ProcessGroup
    timeout_seconds: float
    seed: int
    precision: Precision
    complete_gradients: Callable[[], None]
    complete_early: OnComplete | None

    @classmethod
    def of(
        cls,
        strategy: DistributedStrategy,
        complete_gradients: Callable[[], None],
        complete_early: OnComplete | None = None,
    ) -> RunContext:
        """Creates the context of a strategy whose process group has been initialised."""
        return cls(
            mesh=strategy.mesh,
            rank=strategy.global_rank,
            device=strategy.root_device,
            device_backend=strategy.device_backend,
            pp_group=strategy.group("pp"),
            data_group=strategy.data_group,
            gradient_group=strategy.group(*strategy.gradient_axes),
            timeout_seconds=strategy.timeout_seconds,
            seed=strategy.seed,
            precision=strategy.precision_plugin,
            complete_gradients=complete_gradients,
            complete_early=complete_early,
        )


@dataclass(frozen=True, slots=True)
class WrappedStages:
    """How stages run whose layers have been wrapped, for example sharded.

    Attributes:
        layers: Returns the module that runs a stage's layers.
        gradients: Creates the holder of a stage's gradients until an update. Autograd runs the
            parameters' hooks in each backward.
        change_step: Wraps each of the user's steps.
    """

    layers: Callable[[int], nn.Module]
    gradients: Callable[[int], HeldGradients]
    change_step: Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Session:
    """The parts of a pipeline during a run.

    Attributes:
        mesh: All ranks.
        pipeline: This rank's stages.
        channels: The channels to the other stages.
        metrics: The module's torchmetrics objects.
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
    runner: StepRunner
    updates: Updates
    tied: TiedSums
    hook_log: HookLog
    staleness_log: StalenessLog | None

    @property
    def counted_elsewhere(self) -> list[nn.Parameter]:
        """This rank's parameters that another stage counts in the norm of the whole gradient."""
        parameters = self.pipeline.stages.named_parameters().items()
        return [p for name, p in parameters if not self.tied.counts(name)]

    def close(self, *, failed: bool) -> None:
        """Closes all parts. Collective: every rank must call it."""
        if failed:
            self.pipeline.clear()
        self.hook_log.close()
        self.metrics.detach()
        self.pipeline.detach()
        self.channels.close(failed=failed)


def open_session(
    module: pl.LightningModule,
    found: Layers,
    layers_per_stage: tuple[int, ...],
    config: PipelineConfig,
    run: RunContext,
    *,
    wrapped: WrappedStages | None = None,
    optimizer: Optimizer | None = None,
    logged: LoggedStaleness | None = None,
) -> Session:
    """Creates the parts of a pipeline. Collective: every rank must call it.

    If a later step fails, the channels are closed again.

    Args:
        module: The user's module.
        found: The layers of the pipelined module.
        layers_per_stage: The partition.
        config: The arguments of the pipeline.
        run: The context of the run.
        wrapped: How the stages run; None runs the layers as they are.
        optimizer: The optimizer of this rank's parameters; None if nothing is trained.
        logged: The staleness values to log; None for none.
    """
    predict = config.prediction(optimizer)  # first, for it may refuse
    shape = config.shape(run.mesh, run.rank, layers_per_stage)
    ties = find_ties(found, shape.layers_per_stage)
    homes = shape.rank_of_stage
    channels = connect(
        run.mesh.groups("pp"),
        run.device,
        run.timeout_seconds,
        rank_of_stage=homes,
        holders={tie.ranks(homes) for tie in ties},
        p2p_backend=config.p2p_backend(run.device_backend, run.device),
    )
    with ExitStack() as if_it_fails:
        if_it_fails.callback(channels.close)
        runs_hooks = wrapped is None

        def change(name: str, gradient: Tensor) -> Tensor | None:
            parameter = found.module.get_parameter(name)
            return with_hooks(parameter, gradient) if runs_hooks else gradient

        tied = TiedSums(
            ties, rank_of_stage=homes, rank=shape.rank, links=channels.ties, change=change
        )
        tied.share(dict(found.module.named_parameters(remove_duplicate=False)))
        half = half_precision_of(run.precision)
        weights = None
        if half is not None:
            weights = half.leave_to_stages(found, is_in_graph=wrapped is not None)
        masters_dtype = None if weights is None else torch.float32
        options = StageOptions(
            weight_versions=config.weight_versions,
            seed=run.seed,
            device=run.device,
            gradients=lambda _: HeldGradients(masters_dtype),
            predict=predict,
            measure_discrepancy=logged is not None and logged.discrepancy,
            half=weights,
        )
        if wrapped is not None:
            options = replace(options, layers=wrapped.layers, gradients=wrapped.gradients)
        pipeline = Pipeline(
            found,
            shape,
            channels.links,
            options,
            rank=run.rank,
            on_complete=run.complete_early,
            average_weight=ReplicaWeights(run.gradient_group).average,
            shared=tied.names,
        )
        if_it_fails.callback(pipeline.detach)
        log = None if logged is None else StalenessLog(module, pipeline, logged)
        last_rank = dist.get_process_group_ranks(run.pp_group)[homes[-1]]
        has_last = pipeline.stages.has_last
        metrics = StageMetrics(
            module,
            pipeline_group=run.pp_group,
            data_group=run.data_group,
            source=last_rank,
            is_source=has_last,
        )
        runner = StepRunner(
            module,
            pipeline,
            channels,
            metrics,
            evaluation_microbatches=config.evaluation_microbatches(run.mesh.pp),
            change_step=None if wrapped is None else wrapped.change_step,
            half=half,
        )
        updates = Updates(
            module,
            pipeline,
            run.precision,
            tied,
            complete_gradients=run.complete_gradients,
            on_update=None if log is None else log.post,
            rate_correction=config.rate_correction(shape),
        )
        session = Session(
            mesh=run.mesh,
            pipeline=pipeline,
            channels=channels,
            metrics=metrics,
            runner=runner,
            updates=updates,
            tied=tied,
            hook_log=HookLog(module, run.pp_group, asynchronous=pipeline.asynchronous),
            staleness_log=log,
        )
        if_it_fails.pop_all()
        return session
