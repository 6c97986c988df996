"""One rank's measurements of some training steps, as plain values that can be pickled.

Each rank sends its record. All that combines ranks is computed from the records
(:mod:`.profiling.report`), so it is the same on each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple, TypeVar

from lightning_dist.engine.planning.layer_costs import LayerCosts
from lightning_dist.engine.planning.memory import RankMemory
from lightning_dist.engine.planning.traffic import Traffic
from lightning_dist.engine.profiling.exposure import Exposure
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.schedules.timeline import Span


class ClockOffset(NamedTuple):
    """How far one clock is ahead of another, and a bound of the estimate's error."""

    seconds: float = 0.0
    uncertainty_seconds: float = 0.0


class PhaseKind(StrEnum):
    """Kind of the training loop's work around the steps, of which a schedule knows nothing."""

    DATA_LOADING = "data loading"
    """Waits for the next batch, and moves it to the device."""
    CHECKPOINT = "checkpoint"
    VALIDATION = "validation"


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a rank's training loop, between two times of a clock."""

    rank: int
    kind: PhaseKind
    start_seconds: float
    end_seconds: float

    @property
    def duration_seconds(self) -> float:
        """Length of the phase."""
        return self.end_seconds - self.start_seconds


_Timed = TypeVar("_Timed", Span, Phase)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's place in the run.

    Attributes:
        rank: Global rank.
        host: Name of the rank's machine.
        device: Name of the rank's device; ``"cpu"`` for a CPU.
        precision: The Trainer's precision, or the data type that MixedPrecision computes in.
        stage_group: Place among the stages, equal on ranks that do the same work.
        data_index: Index of the data, equal on ranks that read the same batches.
        strategy: Name of the strategy.
        shape: Shape of the pipeline; None without a pipeline.
    """

    rank: int
    host: str
    device: str = "cpu"
    precision: str = "32-true"
    stage_group: int = 0
    data_index: int = 0
    strategy: str = ""
    shape: PipelineShape | None = None


@dataclass(frozen=True, slots=True)
class StepCount:
    """The counts per step, from steps that were not timed.

    Attributes:
        flops: Operations of matrix products, convolutions and attention, recomputed ones too.
        traffic: Messages to other ranks.
        activation_bytes: Largest number of bytes kept for backwards at a time.
        forward_bytes: Bytes that one forward keeps.
    """

    flops: int = 0
    traffic: tuple[Traffic, ...] = ()
    activation_bytes: int = 0
    forward_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Largest bytes of a rank, measured and predicted, and in use by the device's allocator.

    The prediction is None if the planner has no formula, the allocator's on a CPU.
    """

    measured: RankMemory
    predicted: RankMemory | None = None
    allocated_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank's steps, in seconds of its own clock.

    Attributes:
        place: The rank's place in the run.
        steps: Begin and end of each timed step; a step begins where the previous one ends.
        spans: Spans of the rank in the steps.
        phases: Phases of the rank's training loop around the steps.
        num_samples: Number of samples that the rank has read in the steps.
        num_tokens: Number of tokens that the rank has read in the steps; None if it is unknown.
        count: Counts of one step.
        memory: Memory of the rank.
        exposure: Exposure in a traced step; None if no step was traced.
        layers: Costs of the rank's layers for a micro-batch, by index in the pipelined module.
        stretches: For each span, which stretch between drains and validations it is of, by numbers
            that are the same on all ranks. Empty if all spans are of one.
    """

    place: RankPlace
    steps: tuple[tuple[float, float], ...]
    spans: tuple[Span, ...]
    phases: tuple[Phase, ...]
    num_samples: int
    num_tokens: int | None
    count: StepCount
    memory: MemoryUse
    exposure: Exposure | None = None
    layers: Mapping[int, LayerCosts] = field(default_factory=dict)
    stretches: tuple[int, ...] = ()

    def on_clock(self, offset: ClockOffset) -> RankRecord:
        """Returns the same record on a clock from which this rank's has the given offset."""

        def moved(item: _Timed) -> _Timed:
            start = item.start_seconds - offset.seconds
            end = item.end_seconds - offset.seconds
            return replace(item, start_seconds=start, end_seconds=end)

        return replace(
            self,
            steps=tuple((a - offset.seconds, b - offset.seconds) for a, b in self.steps),
            spans=tuple(map(moved, self.spans)),
            phases=tuple(map(moved, self.phases)),
        )
