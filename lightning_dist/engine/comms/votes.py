"""All ranks stop at the same batch boundary when any of them is asked to, for the same reason.

Lightning broadcasts rank 0's flag before each batch and waits for it, which ties pipeline stages
together at each batch and synchronises a GPU each time, and its signal handler broadcasts too,
which deadlocks in the middle of a step. Here the handler sets a flag, nothing else. At each batch
boundary the flags are combined by an all-reduce that nobody waits for: its result is read ``lag``
boundaries later, when all ranks have long joined it. All ranks read the same result at the same
boundary.

On busy cores a small all-reduce costs by the threads that it wakes. So one of them carries the
flags of a boundary and what ranks vote on at the end of the batch before
(:mod:`.comms.joint_decision`).

``lag`` must be at least the number of batches by which the first rank can be ahead of the last: 1
where each step ties the ranks together, ``num_stages`` for an asynchronous pipeline.

All ranks do at the same place what some of them want to do, and hardly ever wait to find out.

``trainer.should_stop = True`` on one rank would let it leave a loop whose next step the others are
in already. Asking all ranks after each batch would make each wait for the slowest. So each posts
its wish and goes on; only a rank that wants something waits for the others' answers, which are on
their way whatever they want. If all ranks want it, as where a metric that is known everywhere says
so, all know it at once, and do it here. If only some do, they go on with the others for ``lag``
boundaries, by which all know.

``lag`` is at least the number of boundaries by which a rank can be ahead of another, so no rank
waits for votes that it only reads.
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
    """What a run was asked for; of several reasons, the largest counts."""

    NONE = 0
    """Nothing."""
    TERMINATE = 1
    """SIGTERM."""
    INTERRUPT = 2
    """SIGINT, which Ctrl-C sends."""
    REQUEUE = 3
    """SLURM will end the job soon, and could begin it again."""


Posted: TypeAlias = tuple[dist.Work, Tensor]
"""An all-reduce under way, and where its result comes."""


class StopAgreement:
    """One rank's part in the decision to stop.

    Args:
        group: A gloo group of all ranks.
        lag: Boundaries between posting a flag and reading the result.
    """

    def __init__(self, group: dist.ProcessGroup, lag: int) -> None:
        self._group = group
        self._lag = lag
        self._asked: set[StopReason] = set()  # adding is safe in a signal handler
        self._agreed = StopReason.NONE
        self._pending: deque[Posted] = deque()
        self._is_posted = False

    @property
    def requested(self) -> StopReason:
        """What this rank has been asked for, and has not obeyed."""
        return max((StopReason.NONE, *self._asked))

    def request(self, reason: StopReason) -> None:
        """Asks all ranks to stop; safe in a signal handler.

        Args:
            reason: Why.
        """
        self._asked.add(reason)

    def at_boundary(self) -> StopReason:
        """Posts this rank's flag and reads an older result; call it once per batch on each rank.

        Returns:
            Why to stop here, or that there is no reason; the same on all ranks.
        """
        if not self._is_posted:
            self.post(0)
        self._is_posted = False
        if len(self._pending) > self._lag:
            self._read_oldest()
        return self._agreed

    def post(self, vote: int) -> Posted:
        """Posts this rank's flag for the next boundary, and a vote with it. Collective.

        Args:
            vote: Any number.

        Returns:
            The sum of all ranks' votes, as the first element, when it is there.
        """
        flags = [int(reason is self.requested) for reason in list(StopReason)[1:]]
        sums = torch.tensor([vote, *flags], dtype=torch.int32)
        work = dist.all_reduce(sums, group=self._group, async_op=True)
        assert work is not None
        if self._is_posted:  # no boundary came between
            self._pending.pop()
        self._is_posted = True
        self._pending.append((work, sums))
        return work, sums

    def go_on(self) -> None:
        """Forgets a reason that all ranks have agreed on and obeyed; all ranks call it."""
        obeyed = self._agreed
        self.close()
        self._agreed = StopReason.NONE
        self._asked.discard(obeyed)

    def close(self) -> None:
        """Reads what is still on its way."""
        while self._pending:
            self._read_oldest()

    def _read_oldest(self) -> None:
        work, sums = self._pending.popleft()
        work.wait()
        for reason, count in zip(StopReason, [1, *sums[1:].tolist()], strict=True):
            self._agreed = max(self._agreed, reason) if count else self._agreed


class JointDecision:
    """One rank's part in a decision that is up again and again.

    Args:
        group: A gloo group of all ranks.
        lag: Boundaries from a wish of some ranks to what all do; 1 where a boundary ties the ranks.
        post: Posts a vote at a boundary along with something else that is summed then.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        lag: int = 1,
        post: Callable[[int], Posted] | None = None,
    ) -> None:
        self._group = group
        self._lag = lag
        self._post = post or self._post_alone
        self._pending: deque[Posted] = deque()

    def at_boundary(self, wanted: bool) -> bool:
        """Posts this rank's wish; all ranks call it at the same boundaries.

        Args:
            wanted: What this rank wants.

        Returns:
            Whether to do it here, the same on all ranks: all want it, or some did ``lag``
            boundaries ago.
        """
        if len(self._pending) == self._lag and _count(self._pending.popleft()) > 0:
            self.forget()
            return True
        self._pending.append(self._post(int(wanted)))
        if not wanted or _count(self._pending[-1]) < dist.get_world_size(self._group):
            return False
        self.forget()
        return True

    def settle(self, wanted: bool) -> bool:
        """Decides at once, where ranks wait for each other anyway.

        Args:
            wanted: What this rank wants.

        Returns:
            Whether any rank wants it, or has wanted it at a boundary that is not decided yet.
        """
        self._pending.append(self._post_alone(int(wanted)))
        return self._take_votes() > 0

    def forget(self) -> None:
        """Drops what some ranks may have wanted at the last boundaries; all ranks call it."""
        self._take_votes()

    def _post_alone(self, vote: int) -> Posted:
        votes = torch.tensor([vote], dtype=torch.int32)
        work = dist.all_reduce(votes, group=self._group, async_op=True)
        assert work is not None
        return work, votes

    def _take_votes(self) -> int:
        taken = sum(_count(pending) for pending in self._pending)
        self._pending.clear()
        return taken


def _count(pending: Posted) -> int:
    work, votes = pending
    work.wait()
    return int(votes[0].item())
