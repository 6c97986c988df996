"""What one rank has measured of some training steps, in a form that travels.

By how much another host's clock is ahead, from messages that went there and back.

The answer was written somewhere between the sending and the receiving, so half of the round trip
bounds the error, whatever the two ways took. The quickest round trip of several bounds it best
(D. L. Mills, RFC 5905; F. Cristian, Distributed Computing 3, 1989).

What the training loop does around the steps; a schedule knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeVar

from lightning_dist.engine.planning.layer_costs import LayerCosts
from lightning_dist.engine.planning.memory import RankMemory
from lightning_dist.engine.planning.traffic import Traffic
from lightning_dist.engine.profiling.exposure import Exposure
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.schedules.timeline import Span


@dataclass(frozen=True, slots=True)
class Ping:
    """A message there and back, in seconds.

    Attributes:
        sent: By the clock of who asks.
        answered: By the clock of who answers.
        received: By the clock of who asks.
    """

    sent: float
    answered: float
    received: float

    @property
    def round_trip_seconds(self) -> float:
        """There and back."""
        return self.received - self.sent


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far one clock is ahead of another.

    Attributes:
        seconds: The estimate.
        uncertainty_seconds: The truth is no farther from it than this.
    """

    seconds: float = 0.0
    uncertainty_seconds: float = 0.0


def estimate_offset(pings: Sequence[Ping]) -> ClockOffset:
    """Tells by how much the clock of who answers is ahead of that of who asks.

    Args:
        pings: At least one.
    """
    best = min(pings, key=lambda ping: ping.round_trip_seconds)
    middle = (best.sent + best.received) / 2
    return ClockOffset(best.answered - middle, best.round_trip_seconds / 2)


class PhaseKind(StrEnum):
    """What the loop does."""

    DATA_LOADING = "data loading"
    """Waits for the next batch, and moves it to the device."""
    CHECKPOINT = "checkpoint"
    VALIDATION = "validation"


@dataclass(frozen=True, slots=True)
class Phase:
    """One thing that one rank's loop did.

    Attributes:
        rank: Who.
        kind: What.
        start_seconds: When it began.
        end_seconds: When it ended.
    """

    rank: int
    kind: PhaseKind
    start_seconds: float
    end_seconds: float

    @property
    def duration_seconds(self) -> float:
        """How long it took."""
        return self.end_seconds - self.start_seconds


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
