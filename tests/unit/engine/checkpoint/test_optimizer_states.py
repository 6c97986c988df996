"""State of optimizers that is no tensor under a name: trees of tensors, and other keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_dist.engine.checkpoint.files import load_full, load_sharded, save_sharded
from lightning_dist.engine.checkpoint.optimizer_state import (
    join_entries,
    load_by_name,
    split_entries,
)
from lightning_dist.engine.tensors.dtensor import cut, local_part
from lightning_dist.engine.tensors.tree import flatten, tensors_in

Entries = dict[Any, Any]


def entries() -> Entries:
    a, b, c, d, e, f = torch.arange(18.0).view(6, 3)
    return {
        "step": torch.tensor(3.0),
        "momenta": {0.0: a, 0.9: b},
        "kept": [c, None, (d, 2)],
        "beta.squared": e,
        7: f,
        "rule": "nesterov",
    }


def assert_equal(actual: Any, expected: Any) -> None:
    (found, skeleton), (tensors, expected_skeleton) = flatten(actual), flatten(expected)
    assert skeleton == expected_skeleton
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))


def ordered(state: Entries) -> Entries:
    return {key: state[key] for key in entries()}


def test_tensors_in_containers_are_split_off_and_joined_again() -> None:
    tensors, rest = split_entries(entries())
    assert list(tensors) == ["step", "0", "1", "2", "3", "4", "5"]
    assert all(tensor.numel() == 0 for tensor in tensors_in(rest))
    assert_equal(ordered(join_entries(tensors, rest)), entries())


def test_state_that_no_tensors_were_split_from_stays() -> None:
    rest = {"momenta": {0.9: torch.ones(2)}, "rule": "nesterov"}
    step = torch.tensor(3.0)
    assert_equal(join_entries({"step": step}, rest), {**rest, "step": step})


def test_a_directory_has_them_as_shards(tmp_path: Path) -> None:
    path = tmp_path / "some.ckpt"
    group = {"lr": 0.1, "params": ["0.weight", "0.bias"]}
    state = {"0.weight": entries(), "0.bias": {"rule": "none"}}
    weights = {"0.weight": torch.ones(3), "0.bias": torch.ones(3)}
    save_sharded(
        {"state_dict": weights, "optimizer_states": [{"state": state, "param_groups": [group]}]},
        path,
        None,
    )
    for named in (
        load_full(path)["optimizer_states"][0]["state"][0],
        load_sharded(path, lambda _: True)["optimizer_states"][0]["state"]["0.weight"],
    ):
        assert_equal(ordered(named), entries())
    marker = torch.load(path / "lightning.pt", weights_only=True)
    kept = marker["optimizer_states"][0]["state"]
    assert not any(tensor.numel() for tensor in tensors_in(kept))
    assert kept["0.bias"] == {"rule": "none"}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Rank 1 of 2, without the other."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def loaded(parameter: nn.Parameter, state: Entries) -> Entries:
    module = nn.Module()
    module.weight = parameter
    optimizer = torch.optim.SGD(module.parameters())
    groups = [{**optimizer.param_groups[0], "params": ["weight"]}]
    load_by_name(optimizer, module, {"state": {"weight": state}, "param_groups": groups})
    found: Entries = optimizer.state[parameter]
    return found


def sharded(mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    return nn.Parameter(cut(torch.zeros(4, 3), mesh, [placement]))


def test_what_has_a_parameters_shape_is_sharded_in_containers_too(mesh: DeviceMesh) -> None:
    whole = torch.arange(12.0).view(4, 3)
    state = loaded(sharded(mesh, Shard(0)), {"m": {0.9: whole}, "n": [whole], "o": whole})
    for tensor in tensors_in(state):
        assert isinstance(tensor, DTensor)
        assert torch.equal(local_part(tensor), whole[2:])


def test_what_has_another_shape_is_whole_on_each_rank(mesh: DeviceMesh) -> None:
    rows, number = torch.arange(4.0), torch.tensor(3.0)
    state = loaded(sharded(mesh, Shard(0)), {"rows": [rows], "step": number})
    (placed,) = state["rows"]
    assert isinstance(placed, DTensor)
    assert placed.placements == (Replicate(),)
    assert torch.equal(local_part(placed), rows)
    assert not isinstance(state["step"], DTensor)
    whole = loaded(nn.Parameter(torch.zeros(4, 3)), {"rows": rows})
    assert not isinstance(whole["rows"], DTensor)
