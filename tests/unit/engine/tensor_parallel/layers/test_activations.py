"""The sums of gradients over tensor-parallel ranks, on ranks that do not exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_dist.engine.tensor_parallel.layers.activations import all_reduce_gradients


class SentError(Exception):
    """Ends a sum before its result is read, which a meta tensor has none of."""


def test_gradients_in_host_memory_are_summed_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    sent: list[Tensor] = []

    def all_reduce(tensor: Tensor, **_: Any) -> None:
        sent.append(tensor)
        raise SentError

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with pytest.raises(SentError):
        all_reduce_gradients([parameter], init_device_mesh("meta", (2,)))
    assert [(tensor.device.type, len(tensor)) for tensor in sent] == [("meta", 4)]
    dist.destroy_process_group()
