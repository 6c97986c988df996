"""The device that a case runs on, under its strategy and alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Machine:
    """A device that all ranks share.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        is_apart: Whether each rank is a host of its own, as ranks that share a GPU must be.
    """

    device: str = "cpu"
    is_apart: bool = False

    @property
    def torch_device(self) -> torch.device:
        """Where one device trains."""
        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")

    def trainer_options(self, ranks: int) -> dict[str, Any]:
        """Gives what a trainer is told of a number of ranks."""
        place = {"devices": 1, "num_nodes": ranks} if self.is_apart else {"devices": ranks}
        return {"accelerator": "gpu" if self.device == "cuda" else "cpu", **place}


ON_CPU = Machine()
