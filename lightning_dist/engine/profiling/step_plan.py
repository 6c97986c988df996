"""The choice of batches to profile.

Counting operations and tracing collectives slow a step down. So there are separate steps for that,
before the timed ones. Where gradients accumulate, these are as many as an optimizer step takes, so
that its messages and gradients are among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """Role of a batch in the profile."""

    NOTHING = "nothing"
    COUNTED = "counted"
    """Operations, messages and activations are counted; once in a run."""
    EXAMINED = "examined"
    """Layers are timed, or collectives traced; each time before the timed batches."""
    TIMED = "timed"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The roles of all batches of a run.

    Attributes:
        every_n_steps: Number of batches from one begin to the next.
        active_steps: Number of batches that are timed each time.
        warmup_steps: Number of batches before the first with a role.
        num_counted: Number of counted batches, before the first examined one.
        num_examined: Number of examined batches, before the timed ones.

    Raises:
        ValueError: The numbers do not fit together.
    """

    every_n_steps: int
    active_steps: int
    warmup_steps: int
    num_counted: int = 1
    num_examined: int = 1

    def __post_init__(self) -> None:
        """Checks the numbers."""
        least = self.active_steps + self.num_examined
        if self.active_steps < 1 or self.warmup_steps < 0 or self.every_n_steps < least:
            raise ValueError(
                f"active_steps={self.active_steps} must be at least 1, warmup_steps="
                f"{self.warmup_steps} not negative, and every_n_steps={self.every_n_steps} at least"
                f" {least}: active_steps and the batches of an optimizer step,"
                f" {self.num_examined}, which are examined and not timed."
            )

    def role(self, batch: int) -> Role:
        """Returns the role of a batch, counted from the first of the run."""
        if batch < self.warmup_steps:
            return Role.NOTHING
        if batch < self.warmup_steps + self.num_counted:
            return Role.COUNTED
        place = self._place(batch)
        if place < self.num_examined:
            return Role.EXAMINED
        return Role.TIMED if place < self.num_examined + self.active_steps else Role.NOTHING

    def first_alike(self, batch: int) -> int:
        """Returns the first of the batches in a row, up to this one, that have its role."""
        while batch > 0 and self.role(batch - 1) is self.role(batch):
            batch -= 1
        return batch

    def begins_timing(self, batch: int) -> bool:
        """Returns whether a batch is the first of those that are timed together."""
        return self.role(batch) is Role.TIMED and self.role(batch - 1) is Role.EXAMINED

    def ends_timing(self, batch: int) -> bool:
        """Returns whether a batch is the last of those that are timed together."""
        last = self.num_examined + self.active_steps - 1
        return self.role(batch) is Role.TIMED and self._place(batch) == last

    def _place(self, batch: int) -> int:
        return (batch - self.warmup_steps - self.num_counted) % self.every_n_steps
