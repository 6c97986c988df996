"""Find a loader that ends before the length that it has told, while other ranks' go on.

Lengths are compared when training starts, and nobody looks again: Lightning reads no batch ahead of
a loader whose length it knows. One that has told a wrong number ends an epoch where nobody expects
it, the rank goes on to what comes behind the epoch, and the others wait for its gradients. That all
end alike is no mistake; on a single device it would be none. So a rank that ends early leaves a
note, and looks whether all others have left one.
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_dist.engine.comms.store_notes import RankNotes
from lightning_dist.strategies.base.lightning_internals import batches_read

_GRACE_SECONDS = 10.0  # the ranks have just been at the same batch, or nearly


class EarlyEnds:
    """One rank's part in that.

    Args:
        notes: Of all ranks.
        grace_seconds: How long other ranks may take to end, too.
    """

    def __init__(self, notes: RankNotes, grace_seconds: float = _GRACE_SECONDS) -> None:
        self._notes = notes
        self._grace_seconds = grace_seconds

    def check(self, trainer: pl.Trainer) -> None:
        """Looks how an epoch has ended, before this rank waits for others.

        Args:
            trainer: At the end of a training epoch.

        Raises:
            ValueError: This rank's loader has ended early, and another one's has not.
        """
        num_read, length, has_ended = batches_read(trainer)
        if length is None or num_read >= length or not has_ended:
            return
        epoch = trainer.current_epoch
        self._notes.leave(epoch, [num_read])
        if not self._notes.await_common(epoch, [num_read], self._grace_seconds):
            raise ValueError(
                f"The training loader of rank {dist.get_rank()} says that it has {length} batches"
                f" and has ended after {num_read}, and other ranks' have not: these would wait for"
                " the gradients of the former for ever. Make `__len__` tell the number of batches,"
                " or leave it out."
            )
