"""A GPT that fails as asked, for a study whose trials may."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import Tensor

from recipes.gpt import GPT


class FragileGPT(GPT):
    """Fails in its second step.

    Args:
        fault: ``raise`` on all ranks; ``memory`` or ``kill`` on the second one; ``bad`` logs a loss
            that is too large.
    """

    def __init__(self, fault: str = "none") -> None:
        super().__init__(width=16, depth=2, warmup_steps=2)
        self.fault = fault

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        is_second = self.trainer.global_rank == 1
        if batch_idx == 1 and self.fault == "raise":
            raise RuntimeError("asked to raise")
        if batch_idx == 1 and self.fault == "memory" and is_second:
            raise torch.OutOfMemoryError("asked to run out of memory")
        if batch_idx == 1 and self.fault == "kill" and is_second:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)

    def log(self, name: str, value: Any, **options: Any) -> None:
        super().log(name, value * 100 if self.fault == "bad" else value, **options)
