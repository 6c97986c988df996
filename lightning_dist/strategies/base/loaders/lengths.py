"""Checks that the training loaders of all ranks have equally many batches.

Loaders of known length are compared when an epoch starts. One that ends before its
``__len__`` while others go on is found at its end: the rank leaves a note, and checks whether all
others have left one. Of a loader of unknown length Lightning reads one batch ahead. So a rank knows
in time that a batch is its last, and the ranks exchange that during the batch.
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.engine.common.gather import gather_objects
from lightning_dist.engine.comms.store_notes import RankNotes
from lightning_dist.strategies.base.lightning_loaders import batches_read

_GRACE_SECONDS = 10.0  # the ranks have just been at the same batch, or nearly


class TrainingLengths:
    """Checks on one rank that the training loaders of all ranks end at the same batch.

    Args:
        notes: The notes of all ranks.
        group: A gloo group of all ranks.
        grace_seconds: How long other ranks may take to end, too, if a loader ends early.
    """

    def __init__(
        self, notes: RankNotes, group: dist.ProcessGroup, grace_seconds: float = _GRACE_SECONDS
    ) -> None:
        self._notes = notes
        self._group = group
        self._grace_seconds = grace_seconds
        self._is_unknown = False
        self._pending: tuple[dist.Work, list[Tensor]] | None = None

    def begin_epoch(self, trainer: pl.Trainer, *, is_unknown: bool) -> None:
        """Compares the lengths of the loaders. Collective: every rank must call it.

        Args:
            trainer: The trainer, with its loaders set up.
            is_unknown: Whether a loader of this rank has no length.

        Raises:
            ValueError: The numbers of batches differ.
        """
        everyone = gather_objects((trainer.num_training_batches, is_unknown), self._group)
        lengths = [length for length, _ in everyone]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"The ranks have {lengths} training batches, and the ones with more would wait for"
                " the others' gradients for ever. Use a sampler that shares the samples out evenly,"
                " like Lightning's own, or `limit_train_batches`, or pass uneven_inputs=True."
            )
        self._is_unknown = any(unknown for _, unknown in everyone)

    def begin_batch(self, *, is_last: bool) -> None:
        """Posts whether this batch is the rank's last. Collective, before the step."""
        if self._is_unknown:
            own = torch.tensor([int(is_last)], dtype=torch.int32)
            everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
            work = dist.all_gather(everyone, own, group=self._group, async_op=True)
            assert work is not None
            self._pending = work, everyone

    def end_batch(self, batch_index: int) -> None:
        """Checks that all ranks' loaders end at this batch, or none. Collective, behind the step.

        Raises:
            ValueError: Some loaders have ended, and others go on.
        """
        if self._pending is None:
            return
        (work, everyone), self._pending = self._pending, None
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

    def end_epoch(self, trainer: pl.Trainer) -> None:
        """Checks how a training epoch has ended, before this rank waits for others.

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
