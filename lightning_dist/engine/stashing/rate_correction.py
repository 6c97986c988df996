"""Smaller learning rates where weights are stale, at the beginning of a training.

PipeMare (Yang et al., MLSys 2021, section 3.1, technique 1): with a delay of tau updates the
largest stable rate shrinks with tau, and early in a training weights move the most. So stage ``s``
trains with ``rate / tau_s ** (1 - min(k / K, 1))`` at update ``k``, and with the full rate from
``K`` on.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RateCorrection:
    """The correction of one stage.

    Attributes:
        staleness: Updates between the weights of a batch and those that its update is added to.
        num_steps: Updates until there is none any more.
    """

    staleness: int
    num_steps: int

    def factor(self, step: int) -> float:
        """Gives by what the learning rate is multiplied.

        Args:
            step: The update, counted from the beginning of the training.
        """
        remaining = 1.0 - min(step / self.num_steps, 1.0)
        return float(max(self.staleness, 1) ** -remaining)
