"""A layout: all arguments of a strategy that a search chooses, and the expected cost of a step.

The cost is kept by kind (compute, bubble, waits, memory), so that a plan can say why it lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.planning.memory import RankMemory


@dataclass(frozen=True, slots=True)
class Layout:
    """The arguments of a strategy.

    Attributes:
        mesh: Sizes of the mesh.
        batch_size: Samples of a loader's batch, one for each data replica.
        schedule: Schedule of the stages; without effect on a single one.
        stages_per_rank: Stages on each rank.
        num_microbatches: Micro-batches of a loader's batch; 1 without stages.
        partition: Layers of each stage.
        recomputes: Whether activations are computed again (``activation_checkpointing="full"``).
        layers: The argument of :class:`.PipelineConfig` of this name.
    """

    mesh: MeshShape
    batch_size: int
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    num_microbatches: int = 1
    partition: tuple[int, ...] = ()
    recomputes: bool = False
    layers: str = "auto"

    @property
    def global_batch(self) -> int:
        """Samples of an update."""
        return self.batch_size * self.mesh.data_size

    @property
    def microbatch_size(self) -> float:
        """Samples of a micro-batch."""
        return self.batch_size / self.num_microbatches

    @property
    def num_stages(self) -> int:
        """Number of stages of the pipeline."""
        return self.mesh.pp * self.stages_per_rank

    def __str__(self) -> str:
        """Returns the layout in one line."""
        sizes = [f"{name}={size}" for name, size in self.mesh.sizes.items() if size > 1]
        if self.mesh.pp > 1:
            twice = f" x{self.stages_per_rank}" if self.stages_per_rank > 1 else ""
            sizes.append(f"{self.schedule}{twice} m={self.num_microbatches}")
        return " ".join([*(sizes or ["one rank"]), *(["recompute"] if self.recomputes else [])])


INSIDE = "layers' results"
"""What tensor-parallel ranks wait for."""
BATCHES = "batches"
"""What the other ranks of a replica wait for until its reader's batch comes."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Communication that no rank computes beside.

    Attributes:
        num_bytes: Bytes that a rank sends in a step for this purpose.
        seconds: Seconds of a step in which the busiest rank waits for it.
    """

    num_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a step on a layout is expected to cost.

    Attributes:
        compute_seconds: Time in which the busiest rank computes, its update included.
        bubble_seconds: Time in which it waits for other stages to compute.
        waits: Exposed communication, by what is sent.
        memory: Bytes of the fullest rank.
    """

    compute_seconds: float
    bubble_seconds: float
    waits: Mapping[str, Wait]
    memory: RankMemory

    @property
    def exposed_seconds(self) -> float:
        """Time in which the busiest rank waits for communication."""
        return sum(wait.seconds for wait in self.waits.values())

    @property
    def step_seconds(self) -> float:
        """Time of a step."""
        return self.compute_seconds + self.bubble_seconds + self.exposed_seconds

    @property
    def seconds_with_batch(self) -> float:
        """Time of a step whose batch is there."""
        return self.step_seconds - self.waits.get(BATCHES, Wait(0.0, 0.0)).seconds

    def times(self, factor: float) -> Estimate:
        """Returns the estimate of a step that takes so many times as long with its batch there."""
        waits = {
            name: wait if name == BATCHES else replace(wait, seconds=factor * wait.seconds)
            for name, wait in self.waits.items()
        }
        seconds = (factor * self.compute_seconds, factor * self.bubble_seconds)
        return Estimate(*seconds, waits, self.memory)
