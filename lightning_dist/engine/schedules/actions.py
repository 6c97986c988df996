"""The alphabet of schedules: one rank's action on one micro-batch on one stage.

An action is three values and has a short name: ``2F0`` is stage 2's forward of micro-batch 0. The
runtime, the simulator, the plots and the error messages use the same names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum


class ActionKind(StrEnum):
    """Kind of an action; the value is the name used in formatted actions."""

    FORWARD = "F"
    BACKWARD = "B"
    """Full backward: gradients of the inputs and of the weights."""
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_F = "SEND_F"
    """Send an activation to the stage after."""
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    """Send a gradient to the stage before."""
    RECV_B = "RECV_B"
    REDUCE_GRAD = "REDUCE_GRAD"
    """Average gradients over the data replicas."""
    STEP = "STEP"
    """Optimizer update."""

    @property
    def is_compute(self) -> bool:
        """Whether such an action runs the stage's layers."""
        return self.value in ("F", "B", "I", "W")

    @property
    def ends_backward(self) -> bool:
        """Whether a micro-batch's backward on a stage is complete after such an action."""
        return self in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)

    @property
    def is_receive(self) -> bool:
        """Whether such an action may wait for another rank."""
        return self in (ActionKind.RECV_F, ActionKind.RECV_B)

    @property
    def is_send(self) -> bool:
        """Whether such an action sends a message to another rank."""
        return self in (ActionKind.SEND_F, ActionKind.SEND_B)


# Longer names first, or "SEND_F" would be read as an "S" that does not exist.
_KINDS = "|".join(sorted((kind.value for kind in ActionKind), key=len, reverse=True))
_FORMAT = re.compile(rf"(\d+)({_KINDS})(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a schedule."""

    stage_index: int
    kind: ActionKind
    microbatch_index: int
    """The micro-batch; for ``REDUCE_GRAD`` and ``STEP`` the update."""

    def __str__(self) -> str:
        """Returns stage, kind and micro-batch: ``2F0``."""
        return f"{self.stage_index}{self.kind.value}{self.microbatch_index}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Creates an action from its text, such as ``"2F0"`` or ``"1SEND_B3"``."""
        match = _FORMAT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not an action, such as '2F0' or '1SEND_B3'.")
        return cls(int(match[1]), ActionKind(match[2]), int(match[3]))

    def shifted(self, offset: int) -> Action:
        """Returns the same action of a micro-batch that is later by an offset."""
        return replace(self, microbatch_index=self.microbatch_index + offset)
