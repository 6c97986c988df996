"""The facts about a rank that a profiler needs, its stages among them, under any strategy."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.planning.memory import (
    RankMemory,
    TrainedPart,
    pipelined,
    replicated,
    sharded,
)
from lightning_dist.engine.profiling.meters.memory import (
    bytes_of,
    gradient_bytes,
    optimizer_bytes,
)
from lightning_dist.engine.profiling.meters.recorder import Recorder
from lightning_dist.engine.profiling.record import RankPlace, StepCount
from lightning_dist.engine.schedules.registry import find_schedules
from lightning_dist.engine.sharding.wrap_summary import WrapSummary
from lightning_dist.strategies.base.process_mesh import ProcessMesh
from lightning_dist.strategies.ddp import DDPStrategy
from lightning_dist.strategies.fsdp import FSDPStrategy
from lightning_dist.strategies.mesh import MeshStrategy
from lightning_dist.strategies.mesh_runtime.staged_module import StagedModule
from lightning_dist.strategies.pipeline import PipelineStrategy
from lightning_dist.strategies.pipelining.session import Session


def pipeline_of(strategy: Strategy) -> Pipeline | None:
    """Returns this rank's part of a pipeline, while a run is set up.

    Args:
        strategy: Any strategy.

    Returns:
        The rank's stages; None if there are no stages.
    """
    session = session_of(strategy)
    return None if session is None else session.pipeline


def session_of(strategy: Strategy) -> Session | None:
    """Returns the parts of a pipeline, while a run is set up; None if there are no stages.

    Args:
        strategy: Any strategy.
    """
    if isinstance(strategy, PipelineStrategy):
        return strategy.session
    if isinstance(strategy, MeshStrategy) and isinstance(strategy.sharded, StagedModule):
        return strategy.sharded.session
    return None


class RankProbe:
    """Reads this rank's strategy, from the begin of training on. Collective: every rank needs one.

    Args:
        trainer: The trainer, before it trains.
        module: The user's module.

    Attributes:
        mesh: The sizes of the mesh; foreign strategies are taken for replicas only.
        device: The device that this rank computes on.
        pipeline: This rank's stages; None without a pipeline.
        group: A gloo group of all ranks, for this probe alone; None if there is one rank.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        self._trainer, self._module, self._strategy = trainer, module, strategy
        everyone = MeshShape(dp_replicate=trainer.world_size)
        self.mesh = strategy.mesh if isinstance(strategy, ProcessMesh) else everyone
        self.device: torch.device = strategy.root_device
        session = session_of(strategy)
        self.pipeline = None if session is None else session.pipeline
        self.group: dist.ProcessGroup | None = None
        if trainer.world_size > 1:
            self.group = (
                strategy.group(*self.mesh.sizes, purpose="profile")
                if isinstance(strategy, ProcessMesh)
                else dist.new_group(backend="gloo")
            )

    @property
    def recorder(self) -> Recorder | None:
        """The strategy's recorder of this rank's steps; None if the strategy has none."""
        if self.pipeline is not None:
            return self.pipeline.recorder
        return self._strategy.recorder if isinstance(self._strategy, DDPStrategy) else None

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
            strategy=type(self._strategy).__name__,
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

        Args:
            measured: The measured memory of this rank.
            count: The counts of a step.

        Returns:
            The prediction; None if the planner has no formula for the strategy.
        """
        states = round(measured.optimizer_state / max(1, measured.parameters))
        part = TrainedPart(measured.parameters, count.forward_bytes, states)
        strategy, mesh = self._strategy, self.mesh
        if self.pipeline is not None:
            is_plain = mesh.dp_shard == mesh.tp == 1
            return self._predicted_stage(self.pipeline, part) if is_plain else None
        if isinstance(strategy, FSDPStrategy):
            summary = strategy.describe()
            assert isinstance(summary, WrapSummary)
            whole = TrainedPart(summary.num_bytes, count.forward_bytes, states)
            largest = max(row.num_bytes for row in summary.rows)
            return sharded(whole, mesh.dp_shard, summary.peak_whole_bytes, largest)
        if not (isinstance(strategy, DDPStrategy) or mesh.world_size == 1):
            return None
        accumulates = self._trainer.accumulate_grad_batches > 1
        return replicated(part, mesh.data_size, accumulates=accumulates)

    def _predicted_stage(self, pipeline: Pipeline, part: TrainedPart) -> RankMemory:
        shape, stages = pipeline.shape, pipeline.stages
        schedules = find_schedules(shape.schedule)
        count = shape.num_microbatches
        num_batches = schedules.update_rule.steady_batches(shape.num_stages, count)
        schedule = schedules.build(shape.rank_of_stage, count, num_batches)
        in_flight = schedule.in_flight(shape.rank)
        copies = max(stages.num_copies[stage] for stage in stages)  # none where there are several
        return pipelined(part, in_flight, 1 + copies, stages.version_bytes)

    def allocated_bytes(self) -> int | None:
        """Returns the peak bytes of the device's allocator; None on a CPU."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.device)
