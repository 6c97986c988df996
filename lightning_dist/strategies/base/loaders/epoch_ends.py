"""Find loaders of unknown length that end at different batches, before a rank waits for ever.

Lengths that are known are compared when training starts. Lightning reads one batch ahead where they
are not, so a rank knows in time that a batch is its last; the ranks say so while they compute it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class EpochEnds:
    """Compares whether a batch is the last one.

    Args:
        group: A gloo group of all ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._pending: tuple[dist.Work, list[Tensor]] | None = None

    def post(self, *, is_last: bool) -> None:
        """Says whether the batch at hand is this rank's last; all ranks call it before the step.

        Args:
            is_last: Whether the loader has ended.
        """
        own = torch.tensor([int(is_last)], dtype=torch.int32)
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        work = dist.all_gather(everyone, own, group=self._group, async_op=True)
        assert work is not None
        self._pending = work, everyone

    def check(self, batch_index: int) -> None:
        """Reads what the ranks have said; all of them call it behind the step.

        Args:
            batch_index: Of the batch in its epoch.

        Raises:
            ValueError: Some have ended, and others go on.
        """
        if self._pending is None:
            return
        work, everyone = self._pending
        self._pending = None
        work.wait()
        ended = [rank for rank, is_last in enumerate(everyone) if bool(is_last)]
        if 0 < len(ended) < len(everyone):
            raise ValueError(
                f"The training loaders of the ranks {ended} (of {len(everyone)}) have ended after"
                f" {batch_index + 1} batches, and those of the others have not: these would wait"
                " for the gradients of the former for ever. Give each rank as many samples, set"
                " `limit_train_batches`, or, if the data has a length, define `__len__` and pass"
                " uneven_inputs=True to DDPStrategy."
            )
