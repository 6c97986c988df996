"""A pipeline of one stage: no model is cut."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_dist.engine.splitting.split import PipelineSplit
from lightning_dist.engine.splitting.whole_step import WholeStep


@dataclass(frozen=True)
class WholeSplit(PipelineSplit):
    """The whole model on one rank."""

    @override
    def cut(self) -> None:
        """Does nothing."""

    @override
    def whole(self, device: torch.device | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def tensors_outside(self, module: nn.Module) -> list[Tensor]:
        return []

    @override
    def foreign_names(self) -> set[str]:
        return set()

    @override
    def _layer_of(self, name: str) -> int | None:
        return 0


def keep_whole(module: nn.Module) -> WholeSplit:
    """Returns the split of a pipeline of one stage, whose one layer is the module.

    Args:
        module: The user's module.
    """
    return WholeSplit("", WholeStep(module), (1,), stages=(0,), rank_of_stage=(0,), ties=())
