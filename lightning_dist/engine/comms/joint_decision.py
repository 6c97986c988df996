"""All ranks do at the same place what some of them want to do, and hardly ever wait to find out.

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

import torch
import torch.distributed as dist

from lightning_dist.engine.comms.stop_agreement import Posted


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
