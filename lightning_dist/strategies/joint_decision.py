"""All ranks do at the same place what some of them want to do, and hardly ever wait to find out.

``trainer.should_stop = True`` on one rank would let it leave a loop whose next step the others are
in already. Asking all ranks after each batch would make each wait for the slowest. So each posts
its wish and goes on; only a rank that wants something waits for the others' answers, which are on
their way whatever they want. If all ranks want it, as where a metric that is known everywhere says
so, all know it at once, and do it here. If only some do, they go on for one more boundary with the
others, who know by then.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class JointDecision:
    """One rank's part in a decision that is up again and again.

    Args:
        group: A gloo group of all ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._pending: tuple[dist.Work, Tensor] | None = None

    def at_boundary(self, wanted: bool) -> bool:
        """Posts this rank's wish; all ranks call it at the same boundaries.

        Args:
            wanted: What this rank wants.

        Returns:
            Whether to do it here, the same on all ranks: all want it, or some did at the last
            boundary.
        """
        if self._take_votes() > 0:  # not all ranks' votes, else this boundary would not be
            return True
        self._post(wanted)
        if not wanted or self._votes() < dist.get_world_size(self._group):
            return False
        self._pending = None
        return True

    def settle(self, wanted: bool) -> bool:
        """Decides at once, where ranks wait for each other anyway.

        Args:
            wanted: What this rank wants.

        Returns:
            Whether any rank wants it, or has wanted it at the last boundary.
        """
        before = self._take_votes()
        self._post(wanted)
        return self._take_votes() + before > 0

    def forget(self) -> None:
        """Drops what some ranks may have wanted at the last boundary; all ranks call it."""
        self._take_votes()

    def _post(self, wanted: bool) -> None:
        votes = torch.tensor([int(wanted)], dtype=torch.int32)
        work = dist.all_reduce(votes, group=self._group, async_op=True)
        assert work is not None
        self._pending = work, votes

    def _votes(self) -> int:
        if self._pending is None:
            return 0
        work, votes = self._pending
        work.wait()
        return int(votes.item())

    def _take_votes(self) -> int:
        votes = self._votes()
        self._pending = None
        return votes
