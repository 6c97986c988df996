"""All ranks of an evaluation stop at the same batch when any of them is asked to.

In training each step ties the ranks together, and the guard's agreement goes with it. Evaluating
replicas share nothing until their metrics are combined, and may have different numbers of batches.
They agree before each batch that all of them have; the few that are left run to their end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from typing_extensions import override

from lightning_dist.strategies.base.callback_order import add_first_callback
from lightning_dist.strategies.base.ending.run_guard import RunGuard


def stop_evaluations_together(
    trainer: pl.Trainer, guard: RunGuard, group: dist.ProcessGroup
) -> Callable[[], None]:
    """Lets the ranks of ``validate``, ``test`` and ``predict`` agree to stop.

    Args:
        trainer: Changed until the returned function is called.
        guard: Combines the ranks' wishes.
        group: A gloo group of all ranks.

    Returns:
        Undoes the change.
    """
    return add_first_callback(trainer, EvaluationStop(guard, group))


class EvaluationStop(pl.Callback):
    """Asks before each batch whether to stop.

    Args:
        guard: Combines the ranks' wishes.
        group: A gloo group of all ranks.
    """

    def __init__(self, guard: RunGuard, group: dist.ProcessGroup) -> None:
        self._guard = guard
        self._group = group
        self._common: list[int] = []

    def _start(self, lengths: Sequence[int | float]) -> None:
        """Finds out how many batches of each loader all ranks have; of an unknown number, none."""
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, list(lengths), group=self._group)
        self._common = [
            0 if float("inf") in same else min(same) for same in zip(*everyone, strict=False)
        ]

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start(trainer.num_val_batches)

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start(trainer.num_test_batches)

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start(trainer.num_predict_batches)

    @override
    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx < self._common[dataloader_idx]:
            self._guard.stop_if_agreed()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
