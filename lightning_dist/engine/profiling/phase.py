"""What the training loop does around the steps; a schedule knows nothing of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
