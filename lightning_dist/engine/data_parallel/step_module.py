"""Let a wrapper that hooks into ``forward`` see a LightningModule's steps.

DistributedDataParallel prepares itself in its forward. A Lightning step is another method of the
module, so the wrapper gets a module whose forward is whatever step is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class StepModule(nn.Module):
    """Runs a step of a LightningModule as its forward.

    Args:
        module: The user's module; its parameters are this one's.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, step: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Runs a step.

        Args:
            step: Computes with the module's parameters.
            arguments: Of the step.
            keywords: Of the step.
        """
        return step(*arguments, **keywords)
