"""The engine's pipeline in a plain PyTorch loop: beside another raw loop, it is like with like."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.comms.connect import connect
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.pipeline.stages import StageOptions
from lightning_dist.engine.schedules.registry import PipelineShape, find_family
from tests.benchmarks import contestants as c

_TIMEOUT_SECONDS = 300.0


class PlainPipeline:
    """Trains the benchmark's model on this rank's stages.

    Args:
        rank: This rank of two.
        schedule: Name of the schedule.
        num_microbatches: Micro-batches of a batch.
    """

    def __init__(self, rank: int, schedule: str, num_microbatches: int) -> None:
        homes = find_family(schedule).rank_of_stage(2)
        cut = c.CUT if len(homes) == 2 else c.CUT_IN_FOUR
        self._net = c.model()
        self._channels = connect(
            MeshShape(pp=2).groups("pp"),
            torch.device("cpu"),
            _TIMEOUT_SECONDS,
            rank_of_stage=homes,
        )
        shape = PipelineShape(
            schedule, num_microbatches, tuple(cut), rank, stages_per_rank=len(homes) // 2
        )
        self._pipeline = Pipeline(self._net, shape, self._channels.links, StageOptions(), rank=rank)
        self._optimizer = c.adamw(self._pipeline.stages.named_parameters().values())

    def run(self, x: Tensor, y: Tensor) -> None:
        """Runs a batch, and the update that is due."""
        self._pipeline.train_batch((x, y), self._step)
        if self._pipeline.has_gradients:
            self._update()

    def drain(self) -> None:
        """Finishes the batches in flight."""
        for _ in self._pipeline.drain():
            self._update()

    def close(self) -> None:
        """Closes the channels, on all ranks."""
        self._pipeline.close()
        self._channels.close()

    def _step(self, microbatch: Any) -> Tensor:
        x, y = microbatch.content
        return c.loss_of(self._net(x), y)

    def _update(self) -> None:
        self._optimizer.zero_grad()
        self._pipeline.install_gradients()
        with self._pipeline.updating():
            self._optimizer.step()
