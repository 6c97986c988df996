"""Drop the gradients of the last update ahead of the batch that brings new ones.

Lightning zeroes gradients between a step's forward and its backward. A pipeline runs both inside of
``training_step``, so a rank would hold the old gradients and the new ones at once, a fifth of what
Adam's stage holds. No code looks at the old ones there, unless the user overrides one of the hooks
around ``zero_grad``. Then they stay as long as on one device.
"""

from __future__ import annotations

import lightning.pytorch as pl
from torch.optim import Optimizer

from lightning_dist.strategies.base.callback_order import is_overridden_by_user

_HOOKS = ("on_before_zero_grad", "optimizer_zero_grad")


class SpentGradients:
    """Gradients that an update has used.

    Args:
        module: The user's module, of whose trainer a fit begins.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._are_seen = is_overridden_by_user(_HOOKS, module)
        self._spent_by: Optimizer | None = None

    def end_update(self, optimizer: Optimizer) -> None:
        """Notes that an optimizer has used the gradients of its parameters."""
        is_torchs = type(optimizer).zero_grad is Optimizer.zero_grad
        self._spent_by = optimizer if is_torchs and not self._are_seen else None

    def drop(self) -> None:
        """Zeroes gradients that are spent, as Lightning will soon."""
        if self._spent_by is not None:
            self._spent_by.zero_grad()
        self._spent_by = None
