"""Find a tensor-parallel plan by looking at the model."""

from __future__ import annotations

from torch import nn

from lightning_dist.tensor.styles import Style


def find_plan(module: nn.Module) -> dict[str, Style]:
    """Finds a plan."""
    raise NotImplementedError
