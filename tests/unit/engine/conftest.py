from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tensors of the collectives that are called, of which nothing is sent."""
    tensors: list[Tensor] = []

    def send(tensor: Tensor, **_: object) -> Any:
        tensors.append(tensor)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "all_reduce", send)
    monkeypatch.setattr(dist, "broadcast", send)
    return tensors
