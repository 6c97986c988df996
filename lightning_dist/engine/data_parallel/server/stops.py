"""Decisions of all workers that share no step: a stop, above all.

Workers that go on by themselves post nothing that each of them must join. So a worker asks with its
next push. The first server answers all pushes with the number of updates behind which all workers
obey: one more than any of them has pushed. So each one learns of it in time, however far they are
apart, and all obey at the same batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.distributed as dist
from typing_extensions import override

from lightning_dist.engine.comms.votes import JointDecision, StopAgreement, StopReason


class Decisions:
    """What one worker asks for, and what is due."""

    def __init__(self) -> None:
        # The decisions that are asked for, until they are obeyed; a signal handler may add one.
        self.asked: set[int] = set()
        self._due: Mapping[int, int] = {}
        self._obeyed: dict[int, int] = {}
        self._num_updates = 0
        self._num_decisions = len(StopReason)

    def new(self) -> int:
        """Returns the number of a new decision."""
        self._num_decisions += 1
        return self._num_decisions

    def begin(self) -> None:
        """Begins a session with servers, whose clocks begin at 0."""
        self._num_updates, self._due, self._obeyed = 0, {}, {}

    def end_update(self) -> None:
        """Counts an update."""
        self._num_updates += 1

    def learn(self, due: Mapping[int, int]) -> None:
        """Takes what is due from the first server."""
        self._due = due

    def forget(self, decision: int) -> None:
        """Takes a decision for obeyed, where all workers have met and know of it."""
        self.asked.discard(decision)
        self._obeyed[decision] = self._due.get(decision, 0)

    def is_due(self, decision: int) -> bool:
        """Returns whether to obey a decision here; once, for an update may take several batches."""
        due = self._due.get(decision)
        if due != self._num_updates or self._obeyed.get(decision) == due:
            return False
        self.forget(decision)
        return True


class ServerStop(StopAgreement):
    """A stop that workers agree on by way of the first server; the group is not used."""

    def __init__(self, decisions: Decisions, group: dist.ProcessGroup) -> None:
        super().__init__(group, lag=0)
        self._decisions = decisions

    @override
    def request(self, reason: StopReason) -> None:
        super().request(reason)
        self._decisions.asked.add(int(reason))

    @override
    def at_boundary(self) -> StopReason:
        due = [reason for reason in list(StopReason)[1:] if self._decisions.is_due(int(reason))]
        self._agreed = max(self._agreed, *due, StopReason.NONE)
        return self._agreed


class ServerDecision(JointDecision):
    """A recurring decision that workers agree on by way of the first server; without the group.

    ``is_any`` returns whether any rank says yes. Collective: every rank must call it.
    """

    def __init__(
        self, decisions: Decisions, group: dist.ProcessGroup, is_any: Callable[[bool], bool]
    ) -> None:
        super().__init__(group)
        self._decisions = decisions
        self._number = decisions.new()
        self._is_any = is_any

    @override
    def at_boundary(self, wanted: bool) -> bool:
        if wanted:
            self._decisions.asked.add(self._number)
        return self._decisions.is_due(self._number)

    @override
    def decide_now(self, wanted: bool) -> bool:
        result = self._is_any(wanted or self._number in self._decisions.asked)
        self.forget()
        return result

    @override
    def forget(self) -> None:
        self._decisions.forget(self._number)
