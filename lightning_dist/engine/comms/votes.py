"""Decisions at batch boundaries that are the same on all ranks, without a wait.

Lightning broadcasts rank 0's flag before each batch and waits for it, which ties pipeline stages
together, and deadlocks in a signal handler. Here each rank posts an asynchronous all-reduce at each
boundary and reads its result ``lag`` boundaries later, when all ranks have long joined it. ``lag``
is at least the number of boundaries by which one rank can be before another: 1 where each step ties
the ranks together, one more than :meth:`.UpdateRule.lag` for a pipeline. A small all-reduce costs
by the threads that it wakes, so one carries the flags of a :class:`StopAgreement` and the votes of
a :class:`JointDecision`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor


class StopReason(IntEnum):
    """Why a run is to stop; of several reasons, the largest counts."""

    NONE = 0
    TERMINATE = 1  # SIGTERM
    INTERRUPT = 2  # SIGINT, which Ctrl-C sends
    REQUEUE = 3  # SLURM will end the job soon, and can requeue the job


PendingSum: TypeAlias = tuple[dist.Work, Tensor]  # an all-reduce under way, and its result


class StopAgreement:
    """One rank's part in the decision to stop; a signal handler only sets a flag.

    ``lag`` are the boundaries between posting a flag and reading the result.
    """

    def __init__(self, group: dist.ProcessGroup, lag: int) -> None:
        self._group = group
        self._lag = lag
        self._asked: set[StopReason] = set()  # adding is safe in a signal handler
        self._agreed = StopReason.NONE
        self._pending: deque[PendingSum] = deque()
        self._is_posted = False

    @property
    def requested(self) -> StopReason:
        """The reason for which this rank has been asked to stop and has not stopped yet."""
        return max((StopReason.NONE, *self._asked))

    def request(self, reason: StopReason) -> None:
        """Asks all ranks to stop; safe in a signal handler."""
        self._asked.add(reason)

    def at_boundary(self) -> StopReason:
        """Posts this rank's flag; returns whether to stop here, the same on all ranks.

        Collective: call it once per batch.
        """
        if not self._is_posted:
            self.post(0)
        self._is_posted = False
        if len(self._pending) > self._lag:
            self._read_oldest()
        return self._agreed

    def post(self, vote: int) -> PendingSum:
        """Posts this rank's flag for the next boundary, and a vote with it. Collective."""
        flags = [int(reason is self.requested) for reason in list(StopReason)[1:]]
        if self._is_posted:  # no boundary came between
            self._pending.pop()
        self._is_posted = True
        self._pending.append(_begin_sum([vote, *flags], self._group))
        return self._pending[-1]

    def go_on(self, obeyed: StopReason) -> None:
        """Forgets a reason that all ranks have obeyed. Collective: every rank must call it."""
        self.close()
        self._agreed = StopReason.NONE
        self._asked.discard(obeyed)

    def close(self) -> None:
        """Reads the results that are under way."""
        while self._pending:
            self._read_oldest()

    def _read_oldest(self) -> None:
        work, sums = self._pending.popleft()
        work.wait()
        for reason, count in zip(StopReason, [1, *sums[1:].tolist()], strict=True):
            self._agreed = max(self._agreed, reason) if count else self._agreed


class JointDecision:
    """One rank's part in a recurring decision, such as ``trainer.should_stop``.

    Only a rank that votes yes waits for the others' votes, which they post in any case. If all vote
    yes, all act at once. If some do, these go on with the others until all ranks know.

    ``lag`` are the boundaries from some ranks' vote to all ranks' action; 1 if a boundary ties the
    ranks. ``post`` posts a vote at a boundary together with other numbers to sum.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        lag: int = 1,
        post: Callable[[int], PendingSum] | None = None,
    ) -> None:
        self._group = group
        self._lag = lag
        self._post = post or (lambda vote: _begin_sum([vote], group))
        self._pending: deque[PendingSum] = deque()

    def at_boundary(self, wanted: bool) -> bool:
        """Posts this rank's vote. Collective: every rank must call it at the same boundaries.

        Returns whether to act here: all vote yes now, or some did ``lag`` boundaries ago.
        """
        if len(self._pending) == self._lag and _count(self._pending.popleft()) > 0:
            self.forget()
            return True
        self._pending.append(self._post(int(wanted)))
        if not wanted or _count(self._pending[-1]) < dist.get_world_size(self._group):
            return False
        self.forget()
        return True

    def decide_now(self, wanted: bool) -> bool:
        """Returns whether any rank votes yes, or has at an undecided boundary. Collective."""
        self._pending.append(_begin_sum([int(wanted)], self._group))
        votes = [_count(pending) for pending in self._pending]
        self._pending.clear()
        return any(votes)

    def forget(self) -> None:
        """Drops the votes of the last boundaries. Collective: every rank must call it."""
        while self._pending:
            _count(self._pending.popleft())


def _begin_sum(numbers: list[int], group: dist.ProcessGroup) -> PendingSum:
    sums = torch.tensor(numbers, dtype=torch.int32)
    work = dist.all_reduce(sums, group=group, async_op=True)
    assert work is not None
    return work, sums


def _count(pending: PendingSum) -> int:
    work, votes = pending
    work.wait()
    return int(votes[0].item())
