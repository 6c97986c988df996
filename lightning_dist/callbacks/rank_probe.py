"""The facts about a rank that a profiler needs, its stages among them, under any strategy."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.planning.memory import RankMemory, TrainedPart, replicated
from lightning_dist.engine.profiling.meters.memory import (
    bytes_of,
    gradient_bytes,
    optimizer_bytes,
)
from lightning_dist.engine.profiling.record import RankPlace, StepCount
from lightning_dist.strategies.base.rank_view import view_of


class RankProbe:
    """Reads this rank's strategy, from the begin of training on. Collective: every rank needs one.

    Attributes:
        mesh: The sizes of the mesh; foreign strategies are taken for replicas only.
        device: The device that this rank computes on.
        pipeline: This rank's stages; None without a pipeline.
        group: A gloo group of all ranks, for this probe alone; None if there is one rank.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        self._trainer, self._module = trainer, module
        self._view = view = view_of(strategy)
        self.device: torch.device = strategy.root_device
        self.mesh = MeshShape(dp_replicate=trainer.world_size) if view is None else view.mesh
        self.pipeline = None if view is None else view.pipeline
        self.group: dist.ProcessGroup | None = None
        if trainer.world_size > 1:
            gloo = dist.new_group(backend="gloo") if view is None else view.group_of_all("profile")
            self.group = gloo

    @property
    def place(self) -> RankPlace:
        """The identity of this rank: host, device and place in the mesh."""
        rank, is_gpu = self._trainer.global_rank, self.device.type == "cuda"
        return RankPlace(
            rank=rank,
            host=socket.gethostname(),
            device=torch.cuda.get_device_name(self.device) if is_gpu else self.device.type,
            precision=str(self._trainer.precision),
            stage_group=self.mesh.coordinates(rank)["pp"],
            data_index=self.mesh.data_index(rank),
            strategy=type(self._trainer.strategy).__name__,
            shape=None if self.pipeline is None else self.pipeline.shape,
        )

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.group is not None:
            dist.barrier(self.group)

    @property
    def num_counted(self) -> int:
        """Number of batches until the first counted batch has passed all stages."""
        return 1 if self.pipeline is None else 1 + self.pipeline.lag

    @property
    def num_forwards(self) -> int:
        """Number of forwards of this rank in a batch."""
        if self.pipeline is None:
            return 1
        return len(self.pipeline.stages) * max(1, len(self.pipeline.microbatch_sizes))

    # --- memory ------------------------------------------------------------------------------

    def gradient_bytes(self) -> int:
        """Returns the bytes of the parameters' gradients, and of those that a pipeline holds."""
        held = self._held()
        return gradient_bytes(self._module.parameters()) + bytes_of(held)

    def _held(self) -> Iterable[torch.Tensor]:
        if self.pipeline is None or not self.pipeline.has_gradients:
            return []
        update = self.pipeline.due_update
        stages = self.pipeline.stages.values()
        return [g for stage in stages for g in stage.gradients.held(update).values()]

    def measured(self, gradients: int, count: StepCount) -> RankMemory:
        """Returns the measured memory of this rank.

        Args:
            gradients: The most bytes of gradients so far.
            count: The counts of a step.
        """
        stash = {} if self.pipeline is None else self.pipeline.stages.peak_stash_bytes
        return RankMemory(
            parameters=bytes_of(self._module.parameters()),
            gradients=gradients,
            optimizer_state=optimizer_bytes(self._trainer.optimizers),
            activations=count.activation_bytes,
            stash=sum(stash.values()),
        )

    def predicted(self, measured: RankMemory, count: StepCount) -> RankMemory | None:
        """Returns the planner's prediction of this rank's memory.

        Returns:
            The prediction; None if the planner has no formula for the strategy.
        """
        states = round(measured.optimizer_state / max(1, measured.parameters))
        part = TrainedPart(measured.parameters, count.forward_bytes, states)
        accumulates = self._trainer.accumulate_grad_batches > 1
        if self._view is not None:
            return self._view.predict_memory(part, accumulates)
        return replicated(part, 1, accumulates=accumulates) if self.group is None else None

    def allocated_bytes(self) -> int | None:
        """Returns the peak bytes of the device's allocator; None on a CPU."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.device)
