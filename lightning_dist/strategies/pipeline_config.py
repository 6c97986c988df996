"""What a user asks of a pipeline, checked, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_dist.mesh import MeshShape
from lightning_dist.pipeline.schedules import SCHEDULE_NAMES
from lightning_dist.pipeline.shape import PipelineShape

_MICROBATCHES_PER_STAGE = 4


@dataclass(frozen=True)  # without slots, which the command line's parser does not take
class PipelineConfig:
    """The arguments of :class:`~lightning_dist.PipelineStrategy` of the same names.

    Attributes:
        schedule: Name of the schedule.
        num_microbatches: Pieces of each Lightning batch.
        layers: Dotted path of the pipelined module.
        partition: How to cut it, or the layers per stage.
        weight_versions: Which weights an asynchronous backward sees.

    Raises:
        ValueError: One of them is unknown, too small, or does not go with another.
    """

    schedule: Literal["gpipe", "1f1b", "pipedream"] = "1f1b"
    num_microbatches: int | Literal["auto"] = "auto"
    layers: str = "auto"
    partition: Literal["parameters", "uniform"] | Sequence[int] = "parameters"
    weight_versions: Literal["stash", "none"] = "stash"

    def __post_init__(self) -> None:
        """Checks the arguments."""
        if self.schedule not in SCHEDULE_NAMES:
            raise ValueError(
                f"schedule={self.schedule!r} is unknown; use one of {list(SCHEDULE_NAMES)}."
            )
        if self.weight_versions not in ("stash", "none"):
            raise ValueError(
                f"weight_versions={self.weight_versions!r} is unknown; use 'stash' or 'none'."
            )
        if self.num_microbatches != "auto":
            check_count("num_microbatches", self.num_microbatches)
        if self.asynchronous and self.num_microbatches not in ("auto", 1):
            raise ValueError(
                f"num_microbatches={self.num_microbatches} does not go with schedule='pipedream',"
                " which takes each Lightning batch as one micro-batch. Leave it at 'auto' and use"
                " smaller batches, or use schedule='1f1b'."
            )
        if isinstance(self.partition, str) and self.partition not in ("parameters", "uniform"):
            raise ValueError(
                f"partition={self.partition!r} is unknown; use 'parameters', 'uniform' or the"
                " layers per stage, like [3, 3]."
            )

    @property
    def asynchronous(self) -> bool:
        """Whether batches overlap, so that weights are stale."""
        return self.schedule == "pipedream"

    @property
    def may_use_fewer_microbatches(self) -> bool:
        """Whether a batch of fewer samples is cut into fewer micro-batches."""
        return self.num_microbatches == "auto"

    def training_microbatches(self, num_stages: int) -> int:
        """Decides the number of micro-batches of a training batch.

        Args:
            num_stages: Stages of the pipeline.
        """
        if self.num_microbatches != "auto":
            return self.num_microbatches
        return 1 if self.asynchronous else _MICROBATCHES_PER_STAGE * num_stages

    def evaluation_microbatches(self, num_stages: int) -> int:
        """Decides the number of micro-batches of a batch that runs forward only.

        Args:
            num_stages: Stages of the pipeline.
        """
        if self.asynchronous:  # one would leave all stages but one idle
            return _MICROBATCHES_PER_STAGE * num_stages
        return self.training_microbatches(num_stages)

    def shape(self, mesh: MeshShape, rank: int, layers_per_stage: tuple[int, ...]) -> PipelineShape:
        """Says which part of which pipeline a rank is.

        Args:
            mesh: All ranks.
            rank: One of them.
            layers_per_stage: The partition.
        """
        return PipelineShape(
            self.schedule,
            self.training_microbatches(mesh.pp),
            layers_per_stage,
            mesh.coordinates(rank)["pp"],
            may_use_fewer=self.may_use_fewer_microbatches,
            replica_index=mesh.data_index(rank),
        )


def share_among_stages(world_size: int, num_stages: int | Literal["auto"]) -> MeshShape:
    """Shares the ranks among stages and data replicas.

    Args:
        world_size: All ranks.
        num_stages: Stages; ``"auto"`` takes all ranks.

    Raises:
        ValueError: The stages do not divide them.
    """
    if num_stages == "auto":
        return MeshShape(pp=world_size)
    if world_size % num_stages:
        below = num_stages * max(1, world_size // num_stages)
        above = num_stages * (world_size // num_stages + 1)
        raise ValueError(
            f"The world size ({world_size}) must be a multiple of num_stages={num_stages}: each"
            f" data replica takes {num_stages} ranks. Use {below} or {above} devices in all, or"
            " another `num_stages`."
        )
    return MeshShape(pp=num_stages, dp_replicate=world_size // num_stages)


def check_count(name: str, value: int) -> None:
    """Checks a number of something.

    Args:
        name: Of the argument.
        value: Its value.

    Raises:
        ValueError: It is no integer of at least 1.
    """
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be 'auto' or at least 1.")
