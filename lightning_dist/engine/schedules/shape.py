"""Which part of which pipeline a rank is."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.engine.schedules.schedules import find_schedules


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """One rank's part.

    Attributes:
        schedule: Name of the schedule.
        num_microbatches: Micro-batches per batch; 1 for ``"pipedream"``.
        layers_per_stage: The partition.
        rank: This rank, in the pipeline.
        stages_per_rank: Stages on each rank.
        may_use_fewer: Whether a batch of fewer samples is cut into as many micro-batches as it has
            samples; else it is an error.
        replica_index: This rank's data replica; only for the random numbers.
    """

    schedule: str
    num_microbatches: int
    layers_per_stage: tuple[int, ...]
    rank: int
    stages_per_rank: int = 1
    may_use_fewer: bool = False
    replica_index: int = 0

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.layers_per_stage)

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return self.num_stages // self.stages_per_rank

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The rank of each stage."""
        schedules = find_schedules(self.schedule)
        return schedules.rank_of_stage(self.num_ranks, self.stages_per_rank)

    @property
    def stages(self) -> tuple[int, ...]:
        """This rank's stages, in ascending order."""
        return tuple(s for s, home in enumerate(self.rank_of_stage) if home == self.rank)
