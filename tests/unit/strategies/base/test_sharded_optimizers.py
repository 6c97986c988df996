from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.optim import SGD, Muon
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_dist.engine.tensors.dtensor import cut, stacked
from lightning_dist.strategies.base import model_checks
from lightning_dist.strategies.base.model_checks import (
    check_sharded_optimizers,
    check_state_to_save,
)


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    """Rank 1 of 2, without the other."""
    monkeypatch.setattr(model_checks, "gather_objects", lambda own, group: [own])
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def check(weight: Tensor, state: Any) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(weight)
    optimizer = SGD(module.parameters())
    optimizer.state[module.weight] = state
    optimizer.state["of all"] = {"kept": torch.zeros(2, 3)}  # type: ignore[index]
    check_state_to_save([optimizer], module, None)  # type: ignore[arg-type]


def test_plain_tensors_like_a_shard_are_refused(mesh: DeviceMesh) -> None:
    weight, own = cut(torch.ones(4, 3), mesh, [Shard(0)]), torch.zeros(2, 3)
    message = r"SGD keeps .* shape \(2, 3\) for 'weight', which has shape \(4, 3\)"
    for state in ({"momentum": own}, {"momenta": {0.9: [own]}}):
        with pytest.raises(ValueError, match=message):
            check(weight, state)


def test_shards_whole_tensors_and_numbers_pass(mesh: DeviceMesh) -> None:
    weight = cut(torch.ones(4, 3), mesh, [Shard(0)])
    check(weight, {"m": torch.zeros_like(weight), "v": torch.zeros(4, 3), "rows": torch.zeros(4)})
    check(cut(torch.ones(2), mesh, [Shard(0)]), {"step": torch.zeros(1)})
    check(cut(torch.ones(2, 3), mesh, [Replicate()]), {"m": torch.zeros(2, 3)})
    check(torch.ones(2, 3), {"m": torch.zeros(2, 3)})


@pytest.mark.parametrize(
    ("shape", "placement", "is_refused"),
    [
        ((1, 8), Shard(0), True),
        ((8, 1), Shard(1), True),
        ((1, 8), stacked(0, 1), True),
        ((1, 8), Replicate(), False),
        ((1, 8), Shard(1), False),
        ((2, 8), Shard(0), False),
        ((3, 8), Shard(0), False),
    ],
)
def test_muon_wants_a_row_for_each_rank(
    mesh: DeviceMesh, shape: tuple[int, int], placement: Placement, is_refused: bool
) -> None:
    weight = nn.Parameter(cut(torch.ones(shape), mesh, [placement]))
    check_sharded_optimizers([SGD([weight])], None)  # type: ignore[arg-type]
    message = re.escape(f"Muon has a matrix of shape {shape}")
    with pytest.raises(ValueError, match=message) if is_refused else nullcontext():
        check_sharded_optimizers([Muon([weight])], None)  # type: ignore[arg-type]


def test_axes_of_a_mesh_share_rows_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "gather_objects", lambda own, group: [own])
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (2, 2))
    rows, both = (cut(torch.ones(2, 8), mesh, [Shard(0), Shard(dim)]) for dim in (0, 1))
    check_sharded_optimizers([Muon([nn.Parameter(both)])], None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Muon has a matrix"):
        check_sharded_optimizers([Muon([nn.Parameter(rows)])], None)  # type: ignore[arg-type]
    frozen = nn.Parameter(rows, requires_grad=False)
    check_sharded_optimizers([Muon([frozen])], None)  # type: ignore[arg-type]
    dist.destroy_process_group()
