"""Everything of a pipeline that exists between a strategy's ``setup`` and its ``teardown``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision

from lightning_dist.pipeline.connect import Channels
from lightning_dist.pipeline.pipeline import Pipeline
from lightning_dist.strategies.stage_metrics import StageMetrics
from lightning_dist.strategies.step_runner import StepRunner
from lightning_dist.strategies.updates import Updates


@dataclass(frozen=True, slots=True)
class Session:
    """The parts at work.

    Attributes:
        pipeline: This rank's stage.
        channels: To the other stages.
        metrics: The module's torchmetrics objects.
        runner: Runs the user's steps.
        updates: Applies the gradients.
        undo: Gives the module, the trainer and its plugins back as they were.
    """

    pipeline: Pipeline
    channels: Channels
    metrics: StageMetrics
    runner: StepRunner
    updates: Updates
    undo: tuple[Callable[[], None], ...]

    def close(self, *, failed: bool) -> None:
        """Ends everything; each rank must call it.

        Args:
            failed: Whether the run did not end well.
        """
        if failed:
            self.pipeline.clear()
        for undo in self.undo:
            undo()
        self.metrics.detach()
        self.pipeline.stage.detach()
        self.channels.close()


def open_session(
    module: pl.LightningModule,
    precision_plugin: Precision,
    pipeline: Pipeline,
    channels: Channels,
    *,
    stages: dist.ProcessGroup,
    replicas: dist.ProcessGroup,
    undo: Sequence[Callable[[], None]],
) -> Session:
    """Puts the parts together.

    Args:
        module: The user's module.
        precision_plugin: Runs hooks, clipping and the optimizer's step.
        pipeline: This rank's stage.
        channels: To the other stages.
        stages: The gloo group of this replica's stages.
        replicas: The gloo group of the ranks that hold this stage.
        undo: Gives the module, the trainer and its plugins back as they were.
    """
    last_rank = dist.get_process_group_ranks(stages)[-1]
    metrics = StageMetrics(module, stages, replicas, last_rank, pipeline.stage.is_last)
    return Session(
        pipeline,
        channels,
        metrics,
        StepRunner(module, pipeline, channels, metrics),
        Updates(module, pipeline, precision_plugin, replicas),
        tuple(undo),
    )
