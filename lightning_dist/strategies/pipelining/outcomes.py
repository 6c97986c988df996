"""What the last stage found out about a batch, on all stages at the same batch.

Under an asynchronous schedule a stage meets a batch's gradients some batches after its forward, the
first stage the longest after. Were each stage to log what it knows, ranks would log different
batches at the same step. So each stage holds outcomes back until the first one must have them too:
``num_stages - 1`` batches after their own, and at once where an epoch or the run ends, which costs
one wait and changes no weights.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from lightning_dist.engine.pipeline.connect import Channels
from lightning_dist.strategies.pipelining.step_log import BatchLog


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the last stage found out about a batch.

    Attributes:
        log: The user's ``self.log`` calls.
        result: What the step returned, merged over the micro-batches.
        should_stop: Whether the step asked to end the training.
    """

    log: BatchLog
    result: Any
    should_stop: bool = False


class Outcomes:
    """Carries outcomes from the last stage to the others, in order.

    Args:
        channels: This stage's.
    """

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._held: deque[Outcome] = deque()
        self._num_published = 0
        self._num_delivered = 0

    def publish(self, outcome: Outcome | None) -> None:
        """Ends a batch on this stage.

        Args:
            outcome: On the last stage; None on the others, which get it from there.
        """
        self._num_published += 1
        if outcome is None:
            return
        self._held.append(outcome)
        for sender in self._channels.results_out:
            sender.send(outcome)

    def deliver(self, num_held_back: int) -> list[Outcome]:
        """Gives the outcomes that each stage may know now; waits for those still to come.

        Args:
            num_held_back: The newest batches to leave for later.

        Returns:
            Oldest first, each once.
        """
        due = self._num_published - num_held_back - self._num_delivered
        outcomes = [self._next() for _ in range(due)]
        self._num_delivered += len(outcomes)
        return outcomes

    def _next(self) -> Outcome:
        if self._channels.results_in is None:
            return self._held.popleft()
        received = self._channels.results_in.receive()
        assert isinstance(received, Outcome)
        return received
