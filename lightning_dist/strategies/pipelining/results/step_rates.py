"""What steps set in the optimizer, such as its learning rate, for all stages.

Only the last stage runs a step to its end. All stages need what a step sets before their update, so
it travels with the batch's outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl

from lightning_dist.engine.stashing.learning_rates import (
    changes_of_groups,
    group_values,
    install_values,
)

Changes = list[dict[str, Any]]
"""Values of an optimizer's parameter groups that differ, by group."""


class StepRates:
    """Learning rates, and other values of the optimizer's groups, that training steps set.

    Args:
        is_late: Whether the update at hand may be an earlier batch's.
    """

    def __init__(self, trainer: pl.Trainer, *, is_late: bool) -> None:
        self._trainer = trainer
        self._is_late = is_late
        self._before: list[Changes] = []

    def begin_batch(self) -> None:
        """Prepares for the steps of a batch."""
        self._before = [group_values(optimizer) for optimizer in self._trainer.optimizers]

    def take(self) -> list[Changes]:
        """Returns the values that the steps of a batch have set, by optimizer; empty if none.

        Raises:
            ValueError: Steps have set something, and the update at hand is an earlier batch's.
        """
        changes = []
        for before, optimizer in zip(self._before, self._trainer.optimizers, strict=True):
            found = group_values(optimizer)[: len(before)]  # without groups that the step adds
            changes.append(changes_of_groups(before, found))
        names = sorted({name for groups in changes for group in groups for name in group})
        if names and self._is_late:
            raise ValueError(
                f"`training_step` has changed {names} of the optimizer's parameter groups. Under an"
                " asynchronous schedule the update at hand is an earlier batch's. Change them in"
                " `on_train_batch_start`, or use a scheduler, or a synchronous schedule like"
                " '1f1b'."
            )
        return changes if names else []

    def install(self, changes: Sequence[Changes]) -> None:
        """Sets what :meth:`take` has returned on the last stage."""
        for optimizer, groups in zip(self._trainer.optimizers, changes, strict=False):
            present = optimizer.param_groups
            padded = [*groups, *({} for _ in present[len(groups) :])]  # a step may add groups
            install_values(optimizer, padded[: len(present)])
