"""What one rank has measured of some training steps, in a form that travels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from lightning_dist.engine.planning.layer_costs import LayerCosts
from lightning_dist.engine.planning.memory import RankMemory
from lightning_dist.engine.planning.traffic import Traffic
from lightning_dist.engine.profiling.clock_offset import ClockOffset
from lightning_dist.engine.profiling.exposure import Exposure
from lightning_dist.engine.profiling.phase import Phase
from lightning_dist.engine.schedules.shape import PipelineShape
from lightning_dist.engine.schedules.timeline import Span

_Timed = TypeVar("_Timed", Span, Phase)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Who a rank is.

    Attributes:
        rank: Its number.
        host: Name of its machine.
        device: Name of its device; ``"cpu"`` for a CPU.
        precision: As the Trainer's.
        stage_group: Equal on ranks that do the same work: the place among the stages.
        data_index: Equal on ranks that read the same batches.
        strategy: Name of the strategy.
        shape: Of the pipeline; None where there is none.
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
    """What was counted in the steps that nobody timed, per step.

    Attributes:
        flops: Operations of matrix products, convolutions and attention, recomputed ones too.
        traffic: Messages to other ranks.
        activation_bytes: The most that was kept for backwards at a time.
        forward_bytes: What one forward keeps.
    """

    flops: int = 0
    traffic: tuple[Traffic, ...] = ()
    activation_bytes: int = 0
    forward_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of a rank, measured and predicted.

    Attributes:
        measured: The most of each kind.
        predicted: The planner's; None where it has no formula.
        allocated_bytes: The most that the device's allocator has had in use; None on a CPU.
    """

    measured: RankMemory
    predicted: RankMemory | None = None
    allocated_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank's steps, in seconds of its own clock.

    Attributes:
        place: Who it is.
        steps: Begin and end of each timed step; one begins where the one before ends.
        spans: What it did in them.
        phases: What its loop did around them.
        num_samples: That it has read in them.
        num_tokens: That it has read in them; None where batches do not say.
        count: Of one step.
        memory: Bytes.
        exposure: Of a traced step; None where nobody has traced one.
        layers: What its layers cost for a micro-batch, by their place in the pipelined module.
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

    def on_clock(self, offset: ClockOffset) -> RankRecord:
        """Gives the same in seconds of another clock.

        Args:
            offset: By how much this rank's is ahead of that one.
        """
        ahead = offset.seconds

        def moved(item: _Timed) -> _Timed:
            start, end = item.start_seconds - ahead, item.end_seconds - ahead
            return replace(item, start_seconds=start, end_seconds=end)

        return replace(
            self,
            steps=tuple((start - ahead, end - ahead) for start, end in self.steps),
            spans=tuple(map(moved, self.spans)),
            phases=tuple(map(moved, self.phases)),
        )
