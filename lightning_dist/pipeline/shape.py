"""Which part of which pipeline a rank is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """One rank's part.

    Attributes:
        schedule: Name of the schedule.
        num_microbatches: Micro-batches per batch; 1 for asynchronous schedules.
        may_use_fewer: Whether a batch of fewer samples is cut into as many micro-batches as it has
            samples; else it is an error.
        layers_per_stage: The partition.
        stage_index: This rank's stage.
        replica_index: This rank's data replica; only for the random numbers.
    """

    schedule: str
    num_microbatches: int
    layers_per_stage: tuple[int, ...]
    stage_index: int
    may_use_fewer: bool = False
    replica_index: int = 0

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.layers_per_stage)
